"""What `raysvc top` shows: facts of the servers, and what their trainers export, as one line a server.

Always true:
- pure: two snapshots in, lines out;
- a figure that is not known is None, never 0;
- rates are between two snapshots, totals are since the trainer began.
"""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raysvc.metrics import BY_NAME
from raysvc.training.stalls import PARTS

_SAMPLE = re.compile(r"(\w+)\{([^}]*)\} (\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
SCRAPE_TIMEOUT_S = 3.0
_CAUSES = {part: f"stall_{part}_seconds" for part in PARTS}
EXPORTED = ("stall_seconds", "fetch_seconds", "look_ahead_steps", "look_ahead_bytes", *_CAUSES.values())


@dataclass(frozen=True)
class Line:
    """One server.

    Attributes:
        trainer: who holds it.
        step, num_steps: frontier and end.
        steps_per_s: since the snapshot before.
        stall: share of the time since the snapshot before in which the trainer waited, 0 to 1.
        stall_s: all of its waits; of a trainer of one's own, its waits for steps, whether its workers idled or not.
        causes: part of `raysvc.training.stalls.PARTS` -> seconds of all waits that it took, largest first.
        look_ahead: outstanding fetches.
        look_ahead_bytes: of these, beyond the next one.
        nbytes: resident memory of the server.
        lease_age_s: since its trainer was heard of.
        node: where the server runs.
    """

    name: str
    trainer: str | None = None
    step: int | None = None
    num_steps: int | None = None
    steps_per_s: float | None = None
    stall: float | None = None
    stall_s: float | None = None
    causes: Mapping[str, float] | None = None
    look_ahead: int | None = None
    look_ahead_bytes: int | None = None
    nbytes: int | None = None
    lease_age_s: float | None = None
    node: str | None = None


@dataclass(frozen=True)
class Snapshot:
    """What was seen at one moment.

    Attributes:
        time_s: of a clock that only goes forward.
        servers: as `raysvc.inspect.servers.list_servers`.
        exported: metric of the table -> server -> what its trainer exports.
    """

    time_s: float
    servers: Sequence[Mapping[str, Any]]
    exported: Mapping[str, Mapping[str, float]]

    def stall_s(self, server: str) -> float | None:
        """All waits of a server's trainer."""
        known = self.of("stall_seconds", server)
        return self.of("fetch_seconds", server) if known is None else known

    def of(self, metric: str, server: str) -> float | None:
        """A figure, None where nothing is exported."""
        return self.exported[metric].get(server)


def snapshot(time_s: float, servers: Sequence[Mapping[str, Any]], expositions: Iterable[str]) -> Snapshot:
    """Facts of the servers, and the text of every node's metrics endpoint."""
    texts = list(expositions)
    return Snapshot(time_s, servers, {name: _by_server(texts, _sample_of(name)) for name in EXPORTED})


def lines(now: Snapshot, before: Snapshot | None = None) -> list[Line]:
    """One line a server, by name."""
    steps_before = {facts["name"]: facts.get("frontier") for facts in before.servers} if before else {}
    return [
        _line(facts, now, before, steps_before) for facts in sorted(now.servers, key=lambda one: one["name"])
    ]


def text(line: Line) -> str:
    """A line for a terminal that is none."""
    cells = [f"{name}={value}" for name, value in cells_of(line).items() if value != "-"]
    return " ".join(cells)


def cells_of(line: Line) -> dict[str, str]:
    """Column -> text; "-" for what is not known."""

    def show(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return {
        "server": line.name,
        "trainer": line.trainer or "-",
        "step": "-" if line.step is None else f"{line.step}/{line.num_steps}",
        "steps/s": show(line.steps_per_s, ".2f"),
        "stall": show(line.stall, ".1%"),
        "stalled": "-" if line.stall_s is None else f"{line.stall_s:.1f}s",
        "why": _why(line.causes),
        "ahead": show(line.look_ahead, "d"),
        "ahead MB": "-" if line.look_ahead_bytes is None else f"{line.look_ahead_bytes / 1e6:.1f}",
        "memory": "-" if line.nbytes is None else f"{line.nbytes / 1e6:.0f}MB",
        "lease": "-" if line.lease_age_s is None else f"{line.lease_age_s:.0f}s",
        "node": line.node or "-",
    }


def scrape(nodes: Iterable[Mapping[str, Any]]) -> list[str]:
    """Texts of the nodes' metrics endpoints; a node that does not answer is left out."""
    found = []
    for node in nodes:
        if node["Alive"] and node.get("MetricsExportPort"):
            url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
            try:
                with urllib.request.urlopen(url, timeout=SCRAPE_TIMEOUT_S) as answer:
                    found.append(answer.read().decode())
            except OSError:
                continue
    return found


def samples(exposition: str) -> list[tuple[str, dict[str, str], float]]:
    """(name, labels, value) of Prometheus' text format; lines without labels are not of interest."""
    found = (_SAMPLE.fullmatch(line) for line in exposition.splitlines())
    return [(hit[1], dict(_LABEL.findall(hit[2])), float(hit[3])) for hit in found if hit]


def _sample_of(metric: str) -> str:
    found = BY_NAME[metric]
    return f"{found.exported}_sum" if found.kind == "histogram" else found.exported


def _by_server(texts: Sequence[str], name: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for exposition in texts:
        for sample, labels, value in samples(exposition):
            if sample == name and "server" in labels:
                found[labels["server"]] = found.get(labels["server"], 0.0) + value
    return found


def _line(
    facts: Mapping[str, Any], now: Snapshot, before: Snapshot | None, steps_before: Mapping[str, int | None]
) -> Line:
    name = facts["name"]
    if facts.get("state") == "silent":
        return Line(name)
    stall_s, ahead = now.stall_s(name), now.of("look_ahead_steps", name)
    ahead_bytes = now.of("look_ahead_bytes", name)
    steps_per_s = stall = None
    if before is not None:
        passed_s = now.time_s - before.time_s
        if steps_before.get(name) is not None:
            steps_per_s = (facts["frontier"] - (steps_before[name] or 0)) / passed_s
        stall_before_s = before.stall_s(name)
        if stall_s is not None and stall_before_s is not None:
            stall = min(max(stall_s - stall_before_s, 0.0) / passed_s, 1.0)
    holder = facts.get("holder")
    return Line(
        name=name,
        trainer=holder,
        step=facts["frontier"],
        num_steps=facts["num_steps"],
        steps_per_s=steps_per_s,
        stall=stall,
        stall_s=stall_s,
        causes=_causes(now, name),
        look_ahead=None if ahead is None else int(ahead),
        look_ahead_bytes=None if ahead_bytes is None else int(ahead_bytes),
        nbytes=facts.get("rss_bytes"),
        lease_age_s=facts.get("seen_s") if holder else None,
        node=facts.get("node"),
    )


def _causes(now: Snapshot, server: str) -> dict[str, float] | None:
    found = {part: now.of(metric, server) for part, metric in _CAUSES.items()}
    known = {part: seconds for part, seconds in found.items() if seconds is not None}
    return dict(sorted(known.items(), key=lambda item: -item[1])) if known else None


def _why(causes: Mapping[str, float] | None) -> str:
    worth = {part: seconds for part, seconds in (causes or {}).items() if seconds >= 0.05}
    return ",".join(f"{part}:{seconds:.1f}s" for part, seconds in worth.items()) or "-"
