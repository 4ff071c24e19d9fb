"""Knows in one place what of which group is on the device, and decides which moves a call needs.

Groups that are colocated share devices, and one of them at a time has anything there. A move is asked for only when
a part is not where a call needs it; a part that nobody needs stays until another group needs the room.

    call               has to be on the device
    forward            model
    forward_backward   model (with its gradients)
    optim_step         model, optimizer
    train_step         model, optimizer
    evaluate           model
    evaluate_loss      model
    save_checkpoint    model, optimizer
    load_checkpoint    model, optimizer
    save_hf_model      model
    export_weights     model
    import_weights     model
    set_lr             nothing

Always true:
- after `moves(group, call)` the parts above are on the device, and nothing of a group colocated with it;
- moves to host memory come before moves to the device;
- asking again for what is there needs no move; groups that are not colocated are never moved;
- after a failure nothing is assumed: `forget` makes the next call move again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal, NamedTuple

Part = Literal["model", "optimizer"]
MODEL: tuple[Part, ...] = ("model",)
BOTH: tuple[Part, ...] = ("model", "optimizer")
NEEDS: dict[str, tuple[Part, ...]] = {
    "forward": MODEL,
    "forward_backward": MODEL,
    "optim_step": BOTH,
    "train_step": BOTH,
    "evaluate": MODEL,
    "evaluate_loss": MODEL,
    "save_checkpoint": BOTH,
    "load_checkpoint": BOTH,
    "save_hf_model": MODEL,
    "export_weights": MODEL,
    "import_weights": MODEL,
    "set_lr": (),
}


class Move(NamedTuple):
    """A part of a group goes to the device or to host memory."""

    group: str
    part: Part
    on_device: bool


class Residency:
    """Records which parts of which groups are on the device.

    Args:
        colocated: sets of groups that share devices.
    """

    def __init__(self, colocated: Iterable[Collection[str]] = ()) -> None:
        self._sets = [frozenset(names) for names in colocated]
        self._there: dict[str, set[Part]] = {}  # group -> parts on the device
        self._unknown: set[str] = set()  # groups of which nothing is assumed

    def neighbours(self, group: str) -> list[str]:
        """Groups that share devices with `group`."""
        return sorted({name for names in self._sets if group in names for name in names} - {group})

    def on_device(self, group: str) -> frozenset[Part]:
        """Parts that are on the device."""
        return frozenset(self._there.get(group, ()))

    def moves(self, group: str, call: str) -> list[Move]:
        """Returns what to move before `call`, in order; from then on it counts as moved."""
        neighbours = self.neighbours(group)
        needed = NEEDS[call]
        if not neighbours or not needed:
            return []
        out = [move for name in neighbours for move in self._leave(name)]
        unknown = group in self._unknown
        self._unknown.discard(group)
        there = self._there.setdefault(group, set())
        out += [Move(group, part, True) for part in needed if unknown or part not in there]
        there.update(needed)
        return out

    def before_init(self, group: str) -> list[Move]:
        """Returns what has to leave before `group` builds its model on the device."""
        return [move for name in self.neighbours(group) for move in self._leave(name)]

    def built(self, group: str) -> None:
        """`group` has built model and optimizer on the device."""
        self._unknown.discard(group)
        self._there[group] = set(BOTH)

    def forget(self, group: str) -> None:
        """A call failed: what is where is not known."""
        self._unknown.add(group)
        self._there[group] = set(BOTH)

    def _leave(self, group: str) -> list[Move]:
        there = self._there.get(group, set())
        self._there[group] = set()
        # the optimizer first: what leaves last comes back first
        return [Move(group, part, False) for part in reversed(BOTH) if part in there]
