"""The ranks' part of a checkpoint: weights, optimizer, scheduler position, random states.

    <folder>/*.distcp, .metadata   model and optimizer, by torch.distributed.checkpoint: every rank writes its share
    <folder>/rng-<rank>.pt         random states of a rank
    <folder>/worker.json           optimizer steps done, by rank 0
    <folder>/config.json           of the model, by rank 0; see `raysvc.actors.model.hf_model`

The folder is made, published and pruned by `raysvc.training.run_folder`, which adds the data frontier: only its `state.json`,
written last, makes all of it count.

Always true:
- names of weights depend neither on dp_size nor on DDP or FSDP, so any of them reads what another wrote;
- a rank that the saving run did not have keeps its own random state.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raysvc.chat.garbage import no_collection

if TYPE_CHECKING:
    import torch

PROGRESS = "worker.json"


def save(
    folder: Path, rank: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, steps: int
) -> None:
    """Write this rank's part; all ranks call it together."""
    with no_collection():
        import torch
        import torch.distributed.checkpoint as dcp

    dcp.save(_saved_state(model, optimizer), checkpoint_id=folder, no_dist=_alone())
    torch.save(random_state(), folder / f"rng-{rank:05d}.pt")
    if rank == 0:
        (folder / PROGRESS).write_text(json.dumps({"optimizer_steps": steps}))


def load(folder: Path, rank: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Read what `save` wrote, with any dp_size; returns the optimizer steps done. All ranks call it together."""
    with no_collection():
        import torch
        import torch._dynamo  # the functions of the last line import it
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

    state = _state(model, optimizer)
    if optimizer is None:
        dcp.load(state, checkpoint_id=folder, no_dist=_alone())
    else:
        fresh = state["optimizer"]["state"]
        missing = _never_stepped(fresh, dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)
        state["optimizer"]["state"] = {name: fresh[name] for name in fresh if name not in missing}
        dcp.load(state, checkpoint_id=folder, no_dist=_alone())
        state["optimizer"]["state"] |= missing
        names = [name for group in state["optimizer"]["param_groups"] for name in group["params"]]
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        for name, weight in zip(names, weights, strict=True):
            if name in missing:
                optimizer.state.pop(weight, None)  # what a first step makes, as in the run that saved
    set_model_state_dict(model, state["model"])
    rng = folder / f"rng-{rank:05d}.pt"
    if rng.exists():
        set_random_state(torch.load(rng, weights_only=True))
    return int(json.loads((folder / PROGRESS).read_text())["optimizer_steps"])


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
    """State of every generator that a training step may use, as tensors and plain values."""
    import torch

    kind, keys, *rest = np.random.get_state(legacy=True)
    state = {
        "torch": torch.get_rng_state(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys, np.int64)), *rest],
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Go on from `random_state`."""
    import torch

    torch.set_rng_state(state["torch"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    state = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    return state


def _never_stepped(fresh: dict[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The state of weights that a checkpoint has none of: they had no gradient in any step."""
    return {
        name: values
        for name, values in fresh.items()
        if not any(f"optimizer.state.{name}.{field}" in saved for field in values)
    }


def _is_whole(model: torch.nn.Module) -> bool:
    """Whether every rank has a plain module with all weights, under names that no wrapper changes."""
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(model, DistributedDataParallel) or hasattr(model, "set_requires_gradient_sync"):
        return False
    return not any(name.endswith("_orig_mod") for name, _ in model.named_modules())  # of `torch.compile`


def _saved_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """As `_state`, but before a first step without what torch makes of an optimizer then: it counts as a step.

    Of a whole module it is made without `torch._dynamo`, whose import takes longer than to save a small model.
    """
    from raysvc.actors.worker.adamw import PlainAdamW

    if optimizer is not None and not optimizer.state:
        made = _state(model, optimizer)
        optimizer.state.clear()
        return {**made, "optimizer": {**made["optimizer"], "state": {}}}
    stepped = optimizer is None or (
        type(optimizer) is PlainAdamW  # others have imported it, and may say their state in their own way
        and all(weight in optimizer.state for group in optimizer.param_groups for weight in group["params"])
    )
    if not (stepped and _is_whole(model)):
        return _state(model, optimizer)
    state: dict[str, Any] = {"model": model.state_dict()}
    if optimizer is not None:
        name_of = {weight: name for name, weight in model.named_parameters()}
        groups = [
            {**group, "params": [name_of[weight] for weight in group["params"]]}
            for group in optimizer.param_groups
        ]
        by_name = {name_of[weight]: values for weight, values in optimizer.state.items()}
        state["optimizer"] = {"state": by_name, "param_groups": groups}
    return state


def _is_first() -> bool:
    import torch.distributed as dist

    return not dist.is_initialized() or dist.get_rank() == 0


def _alone() -> bool:
    import torch.distributed as dist

    return not dist.is_initialized()
