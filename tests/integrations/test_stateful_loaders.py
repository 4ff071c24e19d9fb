"""`as_torch_dataset()` under the `StatefulDataLoader` protocol: torchdata's own loader, and Lightning's loops, which save and load it."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from raysvc.errors import ConfigError, StateMismatch

from .stream_client import StreamClient, tiny_lm
from .stream_client import client_of as sample_client

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 calls it
Item = dict[str, Any]


client_of = partial(  # three steps of two mini-batches of some micro-batches each
    sample_client, batch_size=80, mini_batch_size=40, micro_batch_tokens=2048
)


def loader_of(client: StreamClient, **options: Any) -> Any:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    return stateful.StatefulDataLoader(client.as_torch_dataset(), batch_size=None, **options)


def bytes_of(items: list[Item]) -> list[bytes]:
    return [pickle.dumps({name: values.tolist() for name, values in item.items()}) for item in items]


def test_a_state_of_torchdatas_loader_gives_the_items_that_were_left_wherever_it_was_taken(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    whole = loader_of(client_of(tmp_path, sample))
    states, given = [whole.state_dict()], []
    for item in whole:
        given.append(item)
        states.append(whole.state_dict())
    expected = bytes_of(given)
    steps = [int(item["ends_mini"]) for item in given]
    assert 6 == sum(steps) < len(steps), "states inside a mini-batch, at its end and at the end of a step"
    for number, state in enumerate(states):
        fresh = loader_of(client_of(tmp_path, sample))
        fresh.load_state_dict(pickle.loads(pickle.dumps(state)))
        resumed = []
        for item in fresh:
            resumed += bytes_of([item])
            assert len(fresh) == len(given), "of the whole run: loops count from its beginning"
        if number == len(
            given
        ):  # the loader calls this an epoch, and begins another one; the plan has no more
            assert not resumed
        assert resumed == expected[number:], number
    assert whole.dataset._client.next_step == 3, "all steps are committed"


def test_a_used_loader_of_torchdata_goes_back_to_an_earlier_state(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    loader = loader_of(client_of(tmp_path, sample))
    items = iter(loader)
    for _ in range(3):
        next(items)
    state, rest = loader.state_dict(), list(items)
    for _ in range(2):
        loader.load_state_dict(state)
        assert bytes_of(list(loader)) == bytes_of(rest)


def test_a_state_inside_an_epoch_that_a_changed_function_orders_in_another_way_is_refused(
    tmp_path: Path, sample: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys
    from types import SimpleNamespace

    import numpy as np

    def client(shift: int) -> StreamClient:
        module = SimpleNamespace(order=lambda epoch, rows: np.roll(np.arange(rows.num_groups), shift * epoch))
        monkeypatch.setitem(sys.modules, "order_of_this_test", module)
        return client_of(tmp_path, sample, epochs=2, order="order_of_this_test:order")

    dataset = client(1).as_torch_dataset()
    states = [dataset.state_dict() for _ in dataset]
    of_epoch = [[state for state in states if state["client"]["epoch"] == epoch] for epoch in (0, 1)]
    for state in (of_epoch[0][0], of_epoch[1][1], of_epoch[1][-2]):
        client(1).as_torch_dataset().load_state_dict(state)
    client(2).as_torch_dataset().load_state_dict(of_epoch[0][0])
    for state in (of_epoch[1][1], of_epoch[1][-2]):
        with pytest.raises(StateMismatch, match="the order of epoch 1 by order_of_this_test:order was"):
            client(2).as_torch_dataset().load_state_dict(state)


def test_a_state_of_other_rows_or_of_another_split_inside_a_step_is_refused_through_torchdatas_loader(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    loader = loader_of(client_of(tmp_path, sample))
    items = iter(loader)
    inside = [next(items), loader.state_dict()][1]
    while not loader.dataset._ends_step:
        next(items)
    ended = loader.state_dict()
    other_order = loader_of(client_of(tmp_path, sample, seed=1))
    for state in (inside, ended):
        other_order.load_state_dict(state)
        with pytest.raises(StateMismatch, match="seed"):
            next(iter(other_order))
    ranks = [loader_of(client_of(tmp_path, sample, rank, 2)) for rank in (0, 1)]
    for rank in ranks:
        rank.load_state_dict(inside)
        with pytest.raises(StateMismatch, match="in the middle of step 0"):
            next(iter(rank))
        rank.load_state_dict(ended)
    rows = [row for rank in ranks for item in rank for row in item["row_ids"].tolist() if row >= 0]
    left = [row for item in items for row in item["row_ids"].tolist() if row >= 0]
    assert sorted(rows) == sorted(left)


@pytest.mark.parametrize("kind", ["torch", "torchdata"])
def test_workers_of_a_loader_are_refused_by_name(kind: str, tmp_path: Path, sample: dict[str, str]) -> None:
    from torch.utils.data import DataLoader

    client = client_of(tmp_path, sample)
    loader = (
        loader_of(client, num_workers=1)
        if kind == "torchdata"
        else DataLoader(client.as_torch_dataset(), batch_size=None, num_workers=1)
    )
    with pytest.raises(
        (ConfigError, RuntimeError), match=r"num_workers.* use 0: look-ahead is done by the server"
    ):
        next(iter(loader))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Lightning
@pytest.mark.parametrize("stop", [1, 2], ids=["inside a step", "at its end"])
def test_lightning_saves_the_loader_in_its_checkpoint_and_goes_on_with_the_losses_of_a_run_that_was_not_stopped(
    stop: int, tmp_path: Path, sample: dict[str, str]
) -> None:
    lightning = pytest.importorskip("pytorch_lightning")
    import torch

    class Stopped(Exception):
        """The process ends here."""

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        """Steps the optimizer where mini-batches end; saves and stops after some of them."""

        automatic_optimization = False

        def __init__(self, stop: int | None = None) -> None:
            super().__init__()
            self.model, self.losses, self.stop = tiny_lm(), [], stop

        def training_step(self, micro: Item, number: int) -> None:
            logits = self.model(micro["input_ids"], attention_mask=micro["attention_mask"]).logits
            labels = micro["labels"][:, 1:].flatten().long()
            total = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels, reduction="sum")
            self.manual_backward(total * micro["loss_scale"])
            self.losses.append(float(total.detach() * micro["loss_scale"]))
            if micro["ends_mini"]:
                self.optimizers().step()
                self.optimizers().zero_grad()

        def on_train_batch_end(self, *others: Any) -> None:
            if self.trainer.global_step == self.stop:
                self.trainer.save_checkpoint(tmp_path / "last.ckpt")
                raise Stopped

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    def fit(module: Module, checkpoint: Path | None = None) -> Any:
        trainer = lightning.Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, max_epochs=1, default_root_dir=str(tmp_path),
        )  # fmt: skip
        trainer.fit(module, loader_of(client_of(tmp_path, sample)), ckpt_path=checkpoint)
        return trainer

    whole, first, second = Module(), Module(stop), Module()
    fit(whole)
    with pytest.raises(Stopped):
        fit(first)
    resumed = fit(second, tmp_path / "last.ckpt")
    assert resumed.global_step == 6
    assert first.losses + second.losses == whole.losses
    assert 0 < len(first.losses) < len(whole.losses)


@pytest.mark.parametrize("layout", ["padded_right", "packed"])
def test_labels_stand_where_torchtitan_looks_for_them(
    layout: str, tmp_path: Path, sample: dict[str, str]
) -> None:
    import torch

    from raysvc.integrations.torchtitan import titan_batch

    client = client_of(tmp_path, sample, layout=layout)
    targets = 0
    for item in client.as_torch_dataset():
        inputs, labels = titan_batch(item)
        assert inputs["input"].shape == inputs["positions"].shape == labels.shape
        at = torch.nonzero(labels != -100)
        for line, place in at.tolist():
            assert labels[line, place] == inputs["input"][line, place + 1]
            assert inputs["positions"][line, place + 1] == inputs["positions"][line, place] + 1, "one row"
        targets += len(at)
    entry = client.entry
    assert targets == sum(sum(entry.row(number)["loss_mask"][1:]) for number in entry.row_ids().tolist())
