"""Gathers what `raysvc top` shows: what servers say of themselves and of their trainers, as one line a server.

Always true:
- pure: facts of one moment, or of two, in; lines out;
- a figure that is not known is None, never 0;
- of a trainer whose lease ran out nothing is shown but its name, its step and its silence;
- a table is never wider than the terminal, no cell of it is cut unless that of the server alone is wider, and what has no room in it
  stands under it, server by server;
- steps per second are between two looks where there are two; other rates and shares are the trainer's own, of its last
  30 seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PRIORITY = (
    "server", "state", "step", "left", "loss", "steps/s", "waiting", "tokens/s", "waited for", "groups", "heard", "trainer", "memory", "ahead",
    "node", "waited", "ahead MB", "version",
)  # fmt: skip
CELL_MARGIN = 3  # two blanks and a line


@dataclass(frozen=True)
class Line:
    """One server.

    Attributes:
        state: free, held, lapsed (its trainer is silent for longer than a lease) or silent (the server is).
        trainer: who holds it.
        versions: of the server and, where it is another, of its trainer.
        step, num_steps: frontier and end; rollouts have no end.
        loss: of the newest step, where the run's folder is seen from here.
        steps_per_s, tokens_per_s: trained.
        stall: share of the time in which the trainer waited for data, 0 to 1; of ranks, the one that waited most.
        stall_s: all of its waits.
        causes: part of `raysvc.trackers.stalls.PARTS` -> seconds of all waits that it took, largest first.
        look_ahead: outstanding fetches.
        look_ahead_bytes: of these, beyond the next one.
        rollouts: counts of groups and of producers; None: an entry is served.
        nbytes: resident memory of the server.
        lease_age_s: since its trainer was heard of.
        node: where the server runs.
    """

    name: str
    state: str = "silent"
    trainer: str | None = None
    versions: str | None = None
    step: int | None = None
    num_steps: int | None = None
    loss: float | None = None
    steps_per_s: float | None = None
    tokens_per_s: float | None = None
    stall: float | None = None
    stall_s: float | None = None
    causes: Mapping[str, float] | None = None
    look_ahead: int | None = None
    look_ahead_bytes: int | None = None
    rollouts: Mapping[str, int] | None = None
    nbytes: int | None = None
    lease_age_s: float | None = None
    node: str | None = None


@dataclass(frozen=True)
class Snapshot:
    """Holds what was seen at one moment.

    Attributes:
        time_s: of a clock that only goes forward.
        servers: as `raysvc.inspect.servers.list_servers`.
    """

    time_s: float
    servers: Sequence[Mapping[str, Any]]


def lines(now: Snapshot, before: Snapshot | None = None) -> list[Line]:
    """One line a server, by name."""
    earlier = {facts["name"]: facts for facts in before.servers} if before else {}
    passed_s = now.time_s - before.time_s if before else 0.0
    servers = sorted(now.servers, key=lambda one: str(one["name"]))
    return [_line(facts, earlier.get(facts["name"], {}), passed_s) for facts in servers]


def text(line: Line) -> str:
    """A line for a terminal that is none."""
    cells = [f"{name}={value}" for name, value in cells_of(line).items() if value != "-"]
    return " ".join(cells)


def cells_of(line: Line) -> dict[str, str]:
    """Column -> text; "-" for what is not known."""

    def show(value: float | None, form: str, unit: str = "") -> str:
        return "-" if value is None else format(value, form) + unit

    groups = line.rollouts or {}
    return {
        "server": line.name,
        "state": line.state,
        "trainer": line.trainer or "-",
        "version": line.versions or "-",
        "step": "-"
        if line.step is None
        else "/".join(str(n) for n in (line.step, line.num_steps) if n is not None),
        "left": _left(line),
        "loss": show(line.loss, ".4g"),
        "steps/s": show(line.steps_per_s, ".2f"),
        "tokens/s": show(line.tokens_per_s, ".0f"),
        "waiting": show(line.stall, ".1%"),
        "waited": show(line.stall_s, ".1f", "s"),
        "waited for": _why(line.causes),
        "ahead": show(line.look_ahead, "d"),
        "ahead MB": "-" if line.look_ahead_bytes is None else f"{line.look_ahead_bytes / 1e6:.1f}",
        "groups": "-" if not groups else f"{groups['ready']} ready, {groups['producers']} producers",
        "memory": "-" if line.nbytes is None else f"{line.nbytes / 1e6:.0f}MB",
        "heard": show(line.lease_age_s, ".0f", "s ago"),
        "node": line.node or "-",
    }


@dataclass(frozen=True)
class FittedTable:
    """Lines for a terminal of some width.

    Attributes:
        columns: of the table, as `cells_of` orders them.
        under: what has no room there, one text a server; "" where there is nothing.
    """

    columns: tuple[str, ...]
    under: tuple[str, ...]


def fitted(rows: Sequence[Mapping[str, str]], width: int) -> FittedTable:
    """Choose the columns that have room, the most important ones first; a column without a value needs none.

    Args:
        rows: of `cells_of`, at least one.
        width: characters of the terminal.
    """
    told = [name for name in rows[0] if name == "server" or any(row[name] != "-" for row in rows)]
    room, chosen = width - 1, set[str]()
    for name in sorted(told, key=PRIORITY.index):
        need = max(len(name), *(len(row[name]) for row in rows)) + CELL_MARGIN
        if need <= room or not chosen:
            chosen.add(name)
            room -= need
    rest = [name for name in told if name not in chosen]
    under = [", ".join(f"{name} {row[name]}" for name in rest if row[name] != "-") for row in rows]
    return FittedTable(tuple(name for name in told if name in chosen), tuple(under))


def _line(facts: Mapping[str, Any], earlier: Mapping[str, Any], passed_s: float) -> Line:
    name, state = facts["name"], facts["state"]
    if state == "silent":
        return Line(name)
    told = (facts.get("trainer") or {}) if state == "held" else {}
    steps_per_s = told.get("steps_per_s")
    steps = facts["frontier"] - earlier.get(
        "frontier", math.inf
    )  # negative where a trainer went back to its checkpoint
    if passed_s and steps >= 0 and state == "held":
        steps_per_s = steps / passed_s
    return Line(
        name=name,
        state=state,
        trainer=facts.get("holder"),
        versions=_versions(facts.get("version"), told.get("version")),
        step=facts["frontier"],
        num_steps=facts["num_steps"],
        loss=facts.get("loss"),
        steps_per_s=steps_per_s,
        tokens_per_s=told.get("tokens_per_s"),
        stall=told.get("stall"),
        stall_s=told.get("stall_s"),
        causes=dict(sorted(told["causes"].items(), key=lambda item: -item[1])) if "causes" in told else None,
        look_ahead=told.get("look_ahead"),
        look_ahead_bytes=told.get("look_ahead_bytes"),
        rollouts=facts.get("rollouts"),
        nbytes=facts.get("rss_bytes"),
        lease_age_s=facts.get("seen_s") if facts.get("holder") else None,
        node=facts.get("node"),
    )


def _versions(server: str | None, trainer: str | None) -> str | None:
    if server is None or trainer in (None, server):
        return server
    return f"{server} (trainer {trainer})"


def _left(line: Line) -> str:
    """Time until the last step, at the rate of now."""
    if line.num_steps is None or line.step is None or not line.steps_per_s:
        return "-"
    minutes, seconds = divmod(round((line.num_steps - line.step) / line.steps_per_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"


def _why(causes: Mapping[str, float] | None) -> str:
    worth = {part: seconds for part, seconds in (causes or {}).items() if seconds >= 0.05}
    return ",".join(f"{part}:{seconds:.1f}s" for part, seconds in worth.items()) or "-"
