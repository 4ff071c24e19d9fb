"""A model that the first rank reads, and all ranks hold: each gets its share of one weight after the other.

This file imports torch; import it inside the function that builds a model.

1. The first rank makes the model, and sends it without its weights; when it ran it, it sends what it found out. Other ranks read
   no file. A model that never ran has no hooks yet, which are functions that cannot be sent.
2. All ranks spread this outline, whose weights are on the device `meta`, by FSDP2 or not at all.
3. The first rank sends each weight in pieces, of which every rank keeps its own rows, and forgets it.

Always true:
- a rank holds its share, and of what is not its own at most a piece; only the first one begins with all;
- weights that are one tensor on the first rank are one tensor on every rank, with the same bytes and dtype;
- random numbers go on alike on all ranks, as if each had made the model;
- what the first rank raises every rank raises.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from raysvc.actors.model.saved_state import Share, share_of

PIECE_BYTES = 32 << 20
LONGEST_LOAD = timedelta(
    days=1
)  # a download from the hub is part of it; a first rank that dies is noticed at once


@dataclass(frozen=True)
class LoadedModel:
    """A model as all ranks know it.

    Attributes:
        module: without weights where there are several ranks.
        found: what `prove` found out about it.
        weights: whole, in the order of `_replace`; empty but on the first of several ranks.
    """

    module: Any
    found: Any
    weights: list[torch.Tensor]


def load_once(
    make: Callable[[], torch.nn.Module], prove: Callable[[Any], Any], rank: int, dp_size: int
) -> LoadedModel:
    """Let the first rank make a model, and find something out about it; all ranks call it.

    Args:
        make: gives the model, which plain `pickle` takes.
        prove: runs it.
        rank: of this process.
        dp_size: number of ranks.

    Raises:
        Exception: what `make` or `prove` raised on the first rank.
    """
    if dp_size == 1:
        module = make()
        return LoadedModel(module, prove(module), [])
    group = dist.new_group(timeout=LONGEST_LOAD, backend="gloo")
    if rank:
        module = _received(group)
        _make_known(module)
        found, random_state = _received(group)
        torch.set_rng_state(random_state)
        return LoadedModel(module, found, [])
    try:
        module = make()
        weights = _take_weights(module)
        dist.broadcast_object_list([module], 0, group)  # it sends nothing before all is pickled
        weights.reverse()
        _replace(module, lambda _: weights.pop())
        found = prove(module)
        weights = _take_weights(module)
        dist.broadcast_object_list([(found, torch.get_rng_state())], 0, group)
    except Exception as error:
        dist.broadcast_object_list([error], 0, group)
        raise
    return LoadedModel(module, found, weights)


def _received(group: dist.ProcessGroup | None) -> Any:
    """What the first rank sent; an error of its is raised here too."""
    message: list[Any] = [None]
    dist.broadcast_object_list(message, 0, group)
    if isinstance(message[0], Exception):
        raise message[0]
    return message[0]


def _make_known(module: torch.nn.Module) -> None:
    """Make a model of each class that `transformers` makes: it notes beside the class, not in the model, what layers may record."""
    if "transformers.modeling_utils" not in sys.modules:
        return  # unpickling has imported what the model is made of
    from transformers.modeling_utils import PreTrainedModel

    with torch.device("meta"):
        for part in module.modules():
            if isinstance(part, PreTrainedModel):
                type(part)(part.config)
                return  # it has made all its parts


def give_out(module: torch.nn.Module, weights: list[torch.Tensor], device: str) -> None:
    """Fill a module whose weights and buffers are on `meta`; all ranks call it. `weights` are those of `LoadedModel`, and are used up."""
    weights.reverse()

    def filled(empty: torch.Tensor) -> torch.Tensor:
        mine = torch.empty_like(empty, device=device)
        _send(weights.pop() if weights else None, share_of(mine))
        return mine

    with torch.no_grad():
        _replace(module, filled)


def _take_weights(module: torch.nn.Module) -> list[torch.Tensor]:
    """Put weights and buffers on `meta`, and return what they were."""
    weights: list[torch.Tensor] = []

    def emptied(whole: torch.Tensor) -> torch.Tensor:
        weights.append(whole.detach())
        return torch.empty_like(whole, device="meta")

    _replace(module, emptied)
    return weights


def _replace(module: torch.nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put another tensor in the place of each weight and buffer; what was one tensor is one again."""
    made: dict[
        int, tuple[torch.Tensor, torch.Tensor]
    ] = {}  # the old ones are kept, so that no id comes twice
    for part in module.modules():
        for own in (part._parameters, part._buffers):
            for name, old in own.items():
                if old is None:
                    continue
                if id(old) not in made:
                    new = make(old)
                    if isinstance(old, torch.nn.Parameter):
                        new = torch.nn.Parameter(new, old.requires_grad)
                    made[id(old)] = old, new
                own[name] = made[id(old)][1]


def _send(whole: torch.Tensor | None, share: Share) -> None:
    """Bring the rows of a share from the first rank, which gives the whole tensor."""
    mine = share.rows.reshape(-1)  # a copy where rows do not lie one after the other
    begin = share.first * prod(share.shape[1:])
    end, total = begin + len(mine), prod(share.shape)
    most = min(total, PIECE_BYTES // mine.itemsize)
    cells = mine.new_empty(most) if whole is None else whole.reshape(-1)
    for at in range(0, total, most or 1):
        stop = min(at + most, total)
        piece = cells[: stop - at] if whole is None else cells[at:stop]
        dist.broadcast(piece.view(torch.uint8), 0)
        first, last = max(at, begin), min(stop, end)
        if first < last:
            mine[first - begin : last - begin].copy_(piece[first - at : last - at])
    if not share.rows.is_contiguous():
        share.rows.copy_(mine.view(share.rows.shape))
