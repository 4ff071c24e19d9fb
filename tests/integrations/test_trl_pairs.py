"""TRL's trainers of pairs on an entry of pairs; oracle: the same raw pairs, tokenized, laid out and trained by TRL alone."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raysvc.errors import ConfigError
from raysvc.job.config import JobConfig
from raysvc.job.job_file import load_job

from .stream_client import StreamClient, arguments, tiny_lm

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")  # of other libraries
TURNS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML = TURNS.replace("<|im_end|>'", "<|im_end|>\\n'")
NUM_PAIRS = 10
Raw = list[dict[str, Any]]


def raw_pairs(chat: bool) -> Raw:
    rng, rows = np.random.default_rng(1), []
    words = ["Ada", "Bo", "apples", "books", "cups", "12", "34", "sunny", "Oslo", "Lima"]
    for n in range(NUM_PAIRS):
        prompt, chosen, rejected = (" ".join(rng.choice(words, rng.integers(2, 9))) for _ in range(3))
        row: dict[str, Any] = {"prompt": prompt + "?", "chosen": f" {chosen}.", "rejected": f" {rejected}!"}
        if chat:
            row = {
                "prompt": [{"role": "user", "content": row["prompt"]}],
                "chosen": [{"role": "assistant", "content": chosen}],
                "rejected": [{"role": "assistant", "content": rejected}],
            }
        rows.append({**row, "margin": n / 8})
    return rows


def job_of(folder: Path, raw: Raw, tokenizer: str, template: str = TURNS, **plan: Any) -> JobConfig:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in raw))
    return load_job(
        {
            "source": {"path": str(path), "carry": {"margin": {"dtype": "float32"}}},
            "tokenizer": {"name": tokenizer, "chat_template": template},
            "cache": {"root": str(folder / "cache")},
            "plan": {"batch_size": 4, "mini_batch_size": 2, "micro_batch_size": 4, "seed": 3, **plan},
        }
    )


def tokenizer_of(folder: str, template: str = TURNS) -> Any:
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(folder)
    found.chat_template = template
    return found


def models(host: str) -> dict[str, Any]:
    return {"model": tiny_lm(), "ref_model": tiny_lm()} if host == "dpo" else {"model": tiny_lm(critic=True)}


HOSTS = {"dpo": "DPO", "reward": "Reward"}


def trl_classes(name: str) -> tuple[Any, Any]:
    """(trainer, config); to import them takes seconds, which the processes that only collect these tests save."""
    return getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")


def trl_alone(host: str, folder: Path, raw: Raw, tokenizer: Any, **options: Any) -> Any:
    """TRL's own trainer of the raw pairs."""
    from datasets import Dataset

    kind, config = trl_classes(HOSTS[host])
    return kind(
        **models(host), processing_class=tokenizer, train_dataset=Dataset.from_list(raw),
        args=config(**arguments(folder / "alone"), bf16=False, max_length=None, **options),
    )  # fmt: skip


def behind_server(
    host: str, folder: Path, client: StreamClient, tokenizer: Any, **options: Any
) -> tuple[Any, Any]:
    """The same trainer on a server's stream; and the batches that its loss gets."""
    from raysvc.integrations.trl_server import PairsFromServer

    base, config = trl_classes(HOSTS[host])
    seen: list[dict[str, Any]] = []

    class Watched(base):  # type: ignore[misc,valid-type]
        def compute_loss(self, model: Any, inputs: Any, *others: Any, **more: Any) -> Any:
            seen.append(dict(inputs))
            return super().compute_loss(model, inputs, *others, **more)

    kind = type("Mine", (PairsFromServer, Watched), {"client": client})
    args = config(**arguments(folder / "ours"), bf16=False, max_length=None, **options)
    return kind(**models(host), processing_class=tokenizer, args=args), seen


def flat(lists: list[list[int]]) -> list[int]:
    return [number for one in lists for number in one]


def order_of(client: StreamClient) -> list[list[int]]:
    """Source rows of each mini-batch, as the plan deals them to one rank."""
    from raysvc.builds.job_plan import plan_of

    plan, out = plan_of(client.job, client.entry), []
    for step in range(plan.schedule.num_steps):
        for mini in plan.step(step, 1).mini_batches:
            read = client.entry.rows.read(mini.row_ids[mini.ranks[0].rows])
            out.append(read.rows["source_row"].tolist()[0::2])
    return out


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "text"])
@pytest.mark.parametrize("host", HOSTS)
def test_trl_gets_the_pairs_that_it_would_have_tokenized_itself_in_the_order_of_the_plan(
    host: str, chat: bool, tmp_path: Path, sample: dict[str, str]
) -> None:
    import torch

    raw, tokenizer = raw_pairs(chat), tokenizer_of(sample["tokenizer"])
    client = StreamClient(job_of(tmp_path, raw, sample["tokenizer"]))
    trainer, seen = behind_server(host, tmp_path, client, tokenizer)
    trainer.train()
    alone, order = trl_alone(host, tmp_path, raw, tokenizer), order_of(client)
    assert len(seen) == len(order) == 5
    assert sorted(flat(order)) == list(range(NUM_PAIRS))
    assert flat(order) != list(range(NUM_PAIRS)), "an order of its own"
    for ours, rows in zip(seen, order, strict=True):
        theirs = alone.data_collator([alone.train_dataset[number] for number in rows])
        assert sorted(ours) == sorted(theirs)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs), rows


def test_where_a_template_writes_behind_the_end_of_a_turn_trl_trains_that_too(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    raw, tokenizer = raw_pairs(chat=True), tokenizer_of(sample["tokenizer"], CHATML)
    client = StreamClient(job_of(tmp_path, raw, sample["tokenizer"], CHATML))
    trainer, seen = behind_server("dpo", tmp_path, client, tokenizer)
    trainer.train()
    alone = trl_alone("dpo", tmp_path, raw, tokenizer)
    for ours, rows in zip(seen, order_of(client), strict=True):
        theirs = alone.data_collator([alone.train_dataset[number] for number in rows])
        assert ours["input_ids"].tolist() == theirs["input_ids"].tolist()
        more = theirs["completion_mask"].bool() & ~ours["completion_mask"].bool()
        assert not (ours["completion_mask"].bool() & ~theirs["completion_mask"].bool()).any()
        assert more.sum(1).tolist() == [1] * len(more)
        assert set(tokenizer.batch_decode(theirs["input_ids"][more][:, None])) == {"\n"}


@pytest.mark.parametrize("host", HOSTS)
def test_the_losses_of_a_run_are_those_of_trl_on_the_same_batches(
    host: str, tmp_path: Path, sample: dict[str, str]
) -> None:
    """Micro-batches of one pair here, of two there: a mean over pairs does not notice."""
    from torch.utils.data import DataLoader

    raw, tokenizer = raw_pairs(chat=True), tokenizer_of(sample["tokenizer"])
    client = StreamClient(job_of(tmp_path, raw, sample["tokenizer"], micro_batch_size=2))
    options = {"learning_rate": 1e-2}
    trainer, seen = behind_server(host, tmp_path, client, tokenizer, **options)
    trainer.train()
    assert len(seen) == NUM_PAIRS, "one pair each"
    alone = trl_alone(host, tmp_path, raw, tokenizer, per_device_train_batch_size=2, **options)
    order = flat(order_of(client))
    loader = DataLoader(alone.train_dataset.select(order), 2, collate_fn=alone.data_collator)
    alone.get_train_dataloader = lambda: loader
    alone.train()

    def losses(one: Any) -> list[float]:
        return [line["loss"] for line in one.state.log_history if "loss" in line]

    assert len(losses(trainer)) == 5
    assert losses(trainer) == pytest.approx(losses(alone), rel=1e-4)
    assert max(losses(trainer)) - min(losses(trainer)) > 1e-3, "they move"


def test_a_rank_that_has_dummies_alone_adds_nothing(tmp_path: Path, sample: dict[str, str]) -> None:
    import torch

    raw, tokenizer = raw_pairs(chat=True)[:3], tokenizer_of(sample["tokenizer"])
    job = job_of(tmp_path, raw, sample["tokenizer"], batch_size=3, mini_batch_size=1, micro_batch_size=2)
    shares: dict[int, list[float]] = {}
    for rank in (0, 1):
        trainer, _ = behind_server("dpo", tmp_path, StreamClient(job, rank, 2), tokenizer)
        micros, alone = list(trainer.client.micro_batches()), trainer.args
        trainer.args = SimpleNamespace(world_size=2, precompute_ref_log_probs=False)
        batches = [trainer.batch_of(micro) for micro in micros]
        trainer.args = alone
        shares[rank] = [float(batch["pair_share"]) for batch in batches]
        for batch in batches:
            trainer_loss = trainer.compute_loss(trainer.model, batch)
            assert bool(trainer_loss == 0) == (float(batch["pair_share"]) == 0)
            assert torch.isfinite(trainer_loss)
    assert sorted(zip(shares[0], shares[1], strict=True)) == [(2.0, 0.0)] * 3


def micro_of(layout: str = "padded_right", **tensors: Any) -> Any:
    return SimpleNamespace(layout=layout, tensors=tensors, denominators=SimpleNamespace(groups=1))


def test_log_probabilities_of_a_reference_come_from_their_column(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    import torch

    raw, tokenizer = raw_pairs(chat=True), tokenizer_of(sample["tokenizer"])
    client = StreamClient(job_of(tmp_path, raw, sample["tokenizer"]))
    trainer, _ = behind_server("dpo", tmp_path, client, tokenizer, precompute_ref_log_probs=True)
    micro = next(client.micro_batches())
    with pytest.raises(ConfigError, match="needs the column 'ref_logprobs'"):
        trainer.batch_of(micro)
    model = tiny_lm().eval()
    with torch.no_grad():
        ids = micro.tensors["input_ids"].long()
        logprobs = model(ids, attention_mask=micro.tensors["attention_mask"]).logits.log_softmax(-1)
    at_labels = logprobs[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    micro.tensors["ref_logprobs"] = torch.nn.functional.pad(at_labels, (1, 0))
    trainer.model.eval()
    loss = trainer.compute_loss(trainer.model, trainer.batch_of(micro))
    assert loss.item() == pytest.approx(np.log(2), rel=1e-5), "the policy is the reference"


def test_what_are_no_padded_pairs_is_refused(tmp_path: Path, sample: dict[str, str]) -> None:
    client = StreamClient(job_of(tmp_path, raw_pairs(chat=True), sample["tokenizer"]))
    trainer, _ = behind_server("dpo", tmp_path, client, tokenizer_of(sample["tokenizer"]))
    with pytest.raises(ConfigError, match="use padded_right"):
        trainer.batch_of(micro_of("packed"))
    with pytest.raises(ConfigError, match="no pairs"):
        trainer.batch_of(micro_of(input_ids=None))
