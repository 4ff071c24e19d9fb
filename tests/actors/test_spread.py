"""Weights that the first rank reads and gives out, beside ranks that each read the whole model; in two processes, and in this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from raysvc.actors.model.load_model import load_lm
from raysvc.actors.worker import spread
from raysvc.errors import ConfigError

from .ranks import DoubleWorker, Ranks, tiny_spec
from .shards import minis_of, random_rows
from .small_models import VOCAB, small_model

NOWHERE = "/there/is/no/such/folder"


def saved_in_parts(folder: Path, name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> str:
    """A folder with several files of weights."""
    from raysvc.actors.model.hf_model import _no_bars

    with _no_bars():
        small_model(name, **changes).to(dtype).save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return str(folder)


def trained(worker: Any, shards: list[Any]) -> list[Any]:
    """What a rank holds, and its losses."""
    from raysvc.actors.worker import checkpoint

    model, ties = worker.model, {}
    for name, weight in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        ties.setdefault(id(weight), []).append((name, str(weight.dtype)))
    buffers = {name: value.numpy().copy() for name, value in model.named_buffers()}
    weights = {name: value.numpy().copy() for name, value in checkpoint.full_weights(model).items()}
    losses = []
    for step, shard in enumerate(shards):
        worker.stage((0, step), shard)
        (result,) = worker.train_step([(0, step)])
        losses.append((result.loss, result.grad_norm))
    after = {name: value.numpy().copy() for name, value in checkpoint.full_weights(model).items()}
    return [list(ties.values()), buffers, weights, losses, after, torch.get_rng_state().numpy()]


def given_and_whole(worker: Any, shards: list[Any]) -> list[Any]:
    """The same of a worker whose weights were given out, and of one that made all of them itself."""
    from raysvc.actors.worker import torch_worker
    from raysvc.actors.worker.adamw import PlainAdamW, decay_groups

    spec = worker.spec
    given, whole = (DoubleWorker(worker.rank, 2, "cpu", spec.model_dump_json()) for _ in range(2))
    if worker.rank:
        given.spec = spec.model_copy(update={"model": NOWHERE})  # it reads nothing
    usual, spread.PIECE_BYTES = spread.PIECE_BYTES, 1000  # of many pieces, some within a row
    try:
        given.build()
    finally:
        spread.PIECE_BYTES = usual
    found = [trained(given, shards)]
    torch.manual_seed(spec.seed)
    module = whole._make()
    whole._proofs = whole._proved(module)
    if spec.strategy == "fsdp":
        module = torch_worker._sharded(module, "cpu", 2, spec.precision == "bf16")
    whole.model, whole._num_entries = module, given._num_entries
    whole.optimizer = PlainAdamW(decay_groups(whole.model, 0.0), lr=spec.learning_rate)
    return [*found, trained(whole, shards), given._proofs == whole._proofs]


def equal(one: Any, other: Any) -> bool:
    """Bit for bit, through lists and dictionaries."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


MODELS: dict[str, dict[str, Any]] = {
    "tied": {"name": "llama", "tie_word_embeddings": True},
    "untied": {"name": "llama", "tie_word_embeddings": False},
    "bf16": {"name": "llama", "tie_word_embeddings": True, "dtype": torch.bfloat16},
    "dropout": {"name": "gpt2"},
}


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("tied", {"strategy": "fsdp"}),
        ("untied", {"strategy": "fsdp", "role": "critic"}),  # its head is made at random
        ("bf16", {"strategy": "fsdp", "precision": "bf16"}),
        ("dropout", {"strategy": "ddp"}),
        ("tiny", {"strategy": "fsdp"}),
    ],
)
def test_weights_losses_and_random_numbers_are_those_of_ranks_that_read_all(
    model: str, changes: dict[str, Any], ranks: Ranks, tmp_path: Path
) -> None:
    path = "tiny" if model == "tiny" else saved_in_parts(tmp_path / "model", **MODELS[model])
    columns = ("returns", "old_values") if "role" in changes else ()
    plan = {"batch_size": 4, "micro_batch_size": 1, "shuffle": "none"}
    shards = [mini[1] for mini in minis_of(random_rows(12, seed=5), plan, 2, columns=columns)]
    per_rank = [([mini[rank] for mini in shards],) for rank in range(2)]
    found = ranks.run(tiny_spec(model=path, **changes), given_and_whole, per_rank)
    for given, whole, same_proofs in found:
        assert same_proofs
        for part, (mine, expected) in enumerate(zip(given, whole, strict=True)):
            assert equal(mine, expected), part
    weights = found[0][0][2]
    assert not equal(weights, found[0][0][4])  # they moved
    together = [sorted(name for name, _ in tie) for tie in found[0][0][0] if len(tie) > 1]
    embedding = {"dropout": "lm.transformer.wte.weight", "untied": ""}.get(
        model, "lm.model.embed_tokens.weight"
    )
    assert together == ([["lm.lm_head.weight", embedding]] if embedding else [])


def hooked(worker: Any) -> Any:
    """What is found out by a run that leaves a hook, which cannot be sent, and the weights of a rank."""

    def prove(module: torch.nn.Module) -> int:
        module.register_forward_hook(lambda *_: None)
        return len(module(torch.ones(1, 2)))

    loaded = spread.load_once(lambda: torch.nn.Linear(2, 3), prove, worker.rank, 2)
    spread.give_out(loaded.module, loaded.weights, "cpu")
    return loaded.found, loaded.module.weight.detach().numpy().copy()


def unsent(worker: Any) -> str:
    """What a rank says of a model that cannot be sent."""
    module = torch.nn.Linear(2, 3)
    module.register_forward_hook(lambda *_: None)
    try:
        spread.load_once(lambda: module, lambda _: None, worker.rank, 2)
    except Exception as error:  # noqa: BLE001  pickle has several
        return str(error)
    return ""


def test_what_a_run_of_a_model_leaves_is_not_sent_and_what_cannot_be_sent_is_named_on_all_ranks(
    ranks: Ranks,
) -> None:
    (found, weights), (told, same) = ranks.run(tiny_spec(), hooked, [(), ()])
    assert (found, told) == (1, 1)
    assert np.array_equal(weights, same)
    one, other = ranks.run(tiny_spec(), unsent, [(), ()])
    assert "lambda" in one
    assert one == other


def failure_of(worker: Any, model: str) -> str:
    """What a rank says of a model."""
    again = DoubleWorker(
        worker.rank, 2, "cpu", worker.spec.model_copy(update={"model": model}).model_dump_json()
    )
    try:
        again.build()
    except ConfigError as error:
        return str(error)
    return ""


def test_all_ranks_name_the_file_that_the_first_one_cannot_read(ranks: Ranks, tmp_path: Path) -> None:
    path = saved_in_parts(tmp_path / "model", "llama")
    bad = sorted((tmp_path / "model").glob("*.safetensors"))[1]
    bad.write_bytes(bad.read_bytes()[:-8])
    one, other = ranks.run(tiny_spec(), failure_of, [(path,), (path,)])
    assert one == other
    assert f"trainer.model: '{path}' cannot be loaded ({bad.name}: " in one


@pytest.mark.parametrize("content", [b"", b"\xff" * 1000])
def test_a_bad_file_of_weights_is_named(content: bytes, tmp_path: Path) -> None:
    path = saved_in_parts(tmp_path / "model", "llama")
    bad = sorted((tmp_path / "model").glob("*.safetensors"))[-1]
    bad.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"cannot be loaded \({bad.name}: "):
        load_lm(path, VOCAB)


@pytest.mark.parametrize("critic", [False, True])
def test_files_that_lack_a_weight_are_refused(critic: bool, tmp_path: Path) -> None:
    path = saved_in_parts(tmp_path / "model", "llama")
    load_lm(path, VOCAB, critic=critic)  # the head of a critic is new
    lost = "model.layers.1.mlp.up_proj.weight"
    for file in (tmp_path / "model").glob("*.safetensors"):
        weights = load_file(file)
        if weights.pop(lost, None) is not None:
            save_file(weights, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=rf"^trainer\.model: the files of '{path}' lack {lost}, "):
        load_lm(path, VOCAB, critic=critic)


def test_odd_tensors_go_out_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread, "PIECE_BYTES", 8)
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.arange(12.0).view(3, 4).t())
    module.frozen = torch.nn.Parameter(torch.arange(5, dtype=torch.bfloat16), requires_grad=False)
    module.none = None
    module.same = module.weight
    for name, value in {
        "number": torch.tensor(3),
        "flags": torch.tensor([True, False]),
        "empty": torch.zeros(0, 4),
    }.items():
        module.register_buffer(name, value, persistent=name == "flags")
    expected = {name: value.clone() for name, value in [*module.named_parameters(), *module.named_buffers()]}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        weights = spread._take_weights(module)
        assert all(value.is_meta for value in [*module.parameters(), *module.buffers()])
        spread.give_out(module, weights, "cpu")
    finally:
        dist.destroy_process_group()
    assert weights == []
    found = dict([*module.named_parameters(), *module.named_buffers()])
    assert found.keys() == expected.keys()
    assert all(
        torch.equal(found[name], value) and found[name].dtype == value.dtype
        for name, value in expected.items()
    )
    assert module.same is module.weight
    assert (module.weight.requires_grad, module.frozen.requires_grad) == (True, False)
    assert list(module.state_dict()) == ["weight", "frozen", "same", "flags"]
