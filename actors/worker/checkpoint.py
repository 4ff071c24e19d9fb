"""The ranks' part of a checkpoint: weights, optimizer, random states, optimizer steps.

    <folder>/model-<rank>.safetensors, optimizer-<rank>.safetensors   each rank's share; see `raysvc.actors.model.saved_state`
    <folder>/rank-<rank>.json    what lies in these, the random states of the rank, the learning rates, and optimizer steps done
    <folder>/config.json         of the model, by rank 0; see `raysvc.actors.model.hf_model`

The folder is made, published and pruned by `raysvc.training.run_folder`, which adds the data frontier: only its `state.json`,
written last, makes all of it count.

Always true:
- names of weights depend neither on dp_size nor on DDP or FSDP, so any of them reads what another wrote;
- a weight that had no gradient in any step has no state of an optimizer, before and after;
- a rank that the saving run did not have keeps its own random state;
- an optimizer keeps the settings that it was made with, but for its learning rates.
"""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raysvc.chat.garbage import no_collection
from raysvc.errors import StateMismatch

if TYPE_CHECKING:
    import torch

    from raysvc.actors.model.saved_state import SavedState

CONFIGS = ("config.json", "generation_config.json")


def save(
    folder: Path, rank: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, steps: int
) -> None:
    """Write this rank's part; all ranks call it together."""
    from raysvc.actors.model.saved_state import write_rank, write_shares

    ranks = _num_ranks()
    weights = _weights(model)
    tensors, values = _optimizer_state(model, optimizer)
    facts = {
        "dp_size": ranks,
        "optimizer_steps": steps,
        "learning_rates": []
        if optimizer is None
        else [float(group["lr"]) for group in optimizer.param_groups],
        "model": write_shares(folder, "model", rank, ranks, weights),
        "optimizer": write_shares(folder, "optimizer", rank, ranks, tensors),
        "optimizer_values": values,
        "random": random_state(),
    }
    configs = [folder / name for name in CONFIGS if rank == 0 and (folder / name).exists()]
    write_rank(folder, rank, facts, configs)


def load(folder: Path, rank: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Read what `save` wrote, with any dp_size; returns the optimizer steps done. All ranks call it together.

    Raises:
        CheckpointDamaged: a file of it is not what was written.
        StateMismatch: it is of another model, or of an earlier version.
    """
    with no_collection():
        import torch

        from raysvc.actors.model.saved_state import SavedState

    with torch.no_grad(), SavedState(folder) as saved:
        weights = _weights(model)
        _check(folder, weights, saved)
        for name, weight in weights.items():
            _fill(weight, "model", name, saved)
        if optimizer is not None:
            _load_optimizer(model, optimizer, saved)
        first = saved.ranks[0]
        if rank < len(saved.ranks):
            set_random_state(saved.ranks[rank]["random"])
        return int(first["optimizer_steps"])


def full_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The whole model in host memory; with several ranks on rank 0 only, empty elsewhere. All ranks call it."""
    if _is_whole(model):
        return {name: weight.cpu() for name, weight in model.state_dict().items()} if _is_first() else {}
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: dict[str, torch.Tensor] = get_model_state_dict(model, options=options)
    return weights


def load_full_weights(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Set the whole model from host memory; every rank has all of it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))


def random_state() -> dict[str, Any]:
    """State of every generator that a training step may use, as JSON."""
    import torch

    kind, keys, *rest = np.random.get_state(legacy=True)
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "python": [version, list(words), gauss],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Go on from `random_state`."""
    import torch

    torch.set_rng_state(_bytes(state["torch"]))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(state["cuda"]))


def _bytes(digits: str) -> torch.Tensor:
    import torch

    return torch.tensor(list(bytes.fromhex(digits)), dtype=torch.uint8)


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Weights and buffers by their own names; each shares the memory of the model's."""
    return {_plain(name): weight for name, weight in model.state_dict().items()}


def _plain(name: str) -> str:
    """Without what DDP and `torch.compile` add."""
    return name.removeprefix("module.").replace("_orig_mod.", "")


def _by_index(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    """Name and weight, in the order in which an optimizer counts them."""
    name_of = {id(weight): _plain(name) for name, weight in model.named_parameters()}
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return [(name_of[id(weight)], weight) for weight in weights]


def _optimizer_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """`<field>:<weight>` -> tensor, and the same of plain values."""
    import torch

    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    if optimizer is None:
        return tensors, values
    names = [name for name, _ in _by_index(model, optimizer)]
    for index, fields in optimizer.state_dict()["state"].items():
        for field, value in fields.items():
            kept = tensors if isinstance(value, torch.Tensor) else values
            kept[f"{field}:{names[index]}"] = value
    return tensors, values


def _load_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, saved: SavedState) -> None:
    """A weight without a saved state has none: what a first step makes, as in the run that saved."""
    weights = _by_index(model, optimizer)
    index_of = {name: index for index, (name, _) in enumerate(weights)}
    state: dict[int, dict[str, Any]] = defaultdict(dict)
    for key, value in saved.ranks[0]["optimizer_values"].items():
        field, _, name = key.partition(":")
        state[index_of[name]][field] = value
    for key in saved.names("optimizer"):
        field, _, name = key.partition(":")
        state[index_of[name]][field] = _like(weights[index_of[name]][1], key, saved)
    groups, rates = optimizer.state_dict()["param_groups"], saved.ranks[0]["learning_rates"]
    if len(rates) == len(groups):
        groups = [{**group, "lr": rate} for group, rate in zip(groups, rates, strict=True)]
    optimizer.load_state_dict({"state": dict(sorted(state.items())), "param_groups": groups})


def _like(weight: torch.Tensor, key: str, saved: SavedState) -> torch.Tensor:
    """A saved tensor of an optimizer, over the ranks as its weight is where it has the same shape."""
    import torch

    if saved.shape("optimizer", key) != tuple(weight.shape) or not hasattr(weight, "placements"):
        return saved.whole("optimizer", key)
    tensor = torch.zeros_like(weight)
    _fill(tensor, "optimizer", key, saved)
    return tensor


def _fill(tensor: torch.Tensor, kind: str, name: str, saved: SavedState) -> None:
    """Copy into `tensor` the saved rows that this rank holds of it."""
    from raysvc.actors.model.saved_state import share_of

    share = share_of(tensor)
    count = len(share.rows) if share.shape else 1
    share.rows.copy_(saved.rows(kind, name, share.first, count))


def _check(folder: Path, weights: dict[str, torch.Tensor], saved: SavedState) -> None:
    there = {name: saved.shape("model", name) for name in saved.names("model")}
    wanted = {name: tuple(weight.shape) for name, weight in weights.items()}
    differ = [name for name in sorted({*there, *wanted}) if there.get(name) != wanted.get(name)]
    if differ:
        name = differ[0]
        what = (
            f"has other weights than the model: {name} is {there.get(name)} there and {wanted.get(name)} here"
        )
        raise StateMismatch(str(folder), what, "give the trainer.model that it was trained from")


def _is_whole(model: torch.nn.Module) -> bool:
    """Returns whether every rank has a plain module with all weights, under names that no wrapper changes."""
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(model, DistributedDataParallel) or hasattr(model, "set_requires_gradient_sync"):
        return False
    return not any(name.endswith("_orig_mod") for name, _ in model.named_modules())  # of `torch.compile`


def _is_first() -> bool:
    import torch.distributed as dist

    return not dist.is_initialized() or dist.get_rank() == 0


def _num_ranks() -> int:
    import torch.distributed as dist

    return int(dist.get_world_size()) if dist.is_initialized() else 1
