"""Reads what a run of rollouts trained from its folder: the groups of each step, what became of their turns, and what was lost.

Axes: N rows, as they were put.
Always true:
- nothing is written, and no server is asked: a run that goes on can be read;
- turns are merged, apart or broken as the server's own code says;
- a group whose rows are gone is named, and the others of its step are told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from raysvc.builds.serve_log import FILE, read_served
from raysvc.errors import ConfigError
from raysvc.rl.rollout_facts import RolloutFacts, facts_of

if TYPE_CHECKING:
    from raysvc.actors.rollouts.group_pool import Key
    from raysvc.actors.rollouts.rollout_stream import RolloutStream
    from raysvc.actors.rollouts.turn_merger import BrokenTurn
    from raysvc.rl.turns import Turns

LAST = 10**9


class StepGroup(NamedTuple):
    """A group of a step: of what rows it is, and what became of its turns (None: rows travel as they were put)."""

    key: Key
    facts: RolloutFacts
    turns: Turns | None

    @property
    def name(self) -> str:
        """Its uid and attempt."""
        return f"{self.key[0]}#{self.key[1]}"

    def line(self) -> dict[str, Any]:
        """Returns a line of a table: counts, and the mean of each column of one number a row."""
        columns = self.facts.columns
        versions, lengths = columns["weight_version"], columns["length"]
        means = {
            name.removesuffix("_mean"): f"{value:.4g}"
            for name, value in self.facts.metrics().items()
            if name.endswith("_mean") and not name.startswith(("length_", "trained_tokens_", "staleness_"))
        }
        return {
            "group": self.name,
            "rows": len(lengths),
            "rows that travel": len(lengths) - (self.turns.num_held if self.turns else 0),
            "weights": "–".join(map(str, sorted({int(versions.min()), int(versions.max())}))),
            "tokens": int(lengths.sum()),
            "longest": int(lengths.max()),
            "trained": int(columns["trained_tokens"].sum()),
            **means,
        }

    def to_json(self) -> dict[str, Any]:
        """All values."""
        columns = {name: values.tolist() for name, values in self.facts.columns.items()}
        holder = self.turns.holder.tolist() if self.turns else list(range(len(self.facts.is_last)))
        return {"group": self.name, "columns": columns, "travels_in_row": holder}


@dataclass(frozen=True)
class RolloutStep:
    """A step that was formed.

    Attributes:
        trained_by: the weight version that trains it, as far as it was told.
        gone: group -> why it is not told: its rows are gone, or it cannot be trained.
    """

    step: int
    trained_by: int
    groups: Sequence[StepGroup]
    gone: Mapping[str, str]

    @property
    def facts(self) -> RolloutFacts | None:
        """The facts of all its rows; None where all are gone."""
        parts = [each.facts for each in self.groups]
        if not parts:
            return None
        columns = {name: np.concatenate([each.columns[name] for each in parts]) for name in parts[0].columns}
        is_last = np.concatenate([each.is_last for each in parts])
        return RolloutFacts(
            columns, is_last, np.repeat(np.arange(len(parts)), [len(each.is_last) for each in parts])
        )

    @property
    def turns(self) -> dict[str, int]:
        """Rows that travel in another one (`merged`), that begin another one and stay `apart`, and broken prefixes."""
        found = [each.turns for each in self.groups if each.turns is not None]
        return {
            "merged": sum(turns.num_held for turns in found),
            "apart": sum(sum(turns.apart.values()) for turns in found),
            "broken": sum(len(turns.broken) for turns in found),
        }

    @property
    def apart(self) -> dict[str, int]:
        """Reasons why rows stay apart, each with how many."""
        return dict(sum((Counter(each.turns.apart) for each in self.groups if each.turns), Counter()))

    @property
    def broken(self) -> list[BrokenTurn]:
        """The broken prefixes."""
        from raysvc.actors.rollouts.turn_merger import BrokenTurn

        return [
            BrokenTurn(each.key, prefix) for each in self.groups if each.turns for prefix in each.turns.broken
        ]


class RolloutRun:
    """See the module; `open_run` makes it."""

    def __init__(self, name: str, stream: RolloutStream) -> None:
        self.name, self._stream = name, stream

    @property
    def steps(self) -> list[int]:
        """The steps that were formed and are not forgotten."""
        return sorted(self._stream.pool.steps)

    def step(self, step: int) -> RolloutStep:
        """One of them."""
        trained_by, pool = self._stream.trained_by(step), self._stream.pool
        groups: list[StepGroup] = []
        gone: dict[str, str] = {}
        for key in pool.steps[step]:
            try:
                batch = self._stream.batch_of_group(key)
            except (KeyError, OSError, ValueError) as error:  # ArrowInvalid is a ValueError
                gone[f"{key[0]}#{key[1]}"] = pool.quarantined.get(key, f"its rows are gone ({error})")
                continue
            if key in pool.quarantined:
                gone[f"{key[0]}#{key[1]}"] = pool.quarantined[key]
                continue
            batch, withheld = self._stream.as_trained(batch, [key], np.array([len(batch)]))
            facts = facts_of(batch, np.zeros(len(batch), np.int64), trained_by, withheld)
            groups.append(StepGroup(key, facts, self._stream.turns_of(key, batch)))
        return RolloutStep(step, trained_by, groups, gone)

    def each_step(self) -> Iterator[RolloutStep]:
        """All of them, one after the other; one at a time is in memory."""
        for step in self.steps:
            yield self.step(step)
            self._stream.free()

    def lost(self) -> dict[str, int]:
        """Reasons why groups or prompts are not trained, each with how many."""
        store, pool = self._stream.store, self._stream.pool
        if self._stream.prompts is not None:
            return dict(Counter(store.desk.book.lost.values()))
        counts = {
            "evicted": pool.evicted,
            "dropped": len(store.dropped),
            "quarantined": len(pool.quarantined),
        }
        return {reason: count for reason, count in counts.items() if count}

    def lost_prompts(self) -> dict[str, str]:
        """Prompt of the server's stream -> why it is not trained; and what is quarantined, with its reason."""
        quarantined = {f"{uid}#{n}": reason for (uid, n), reason in self._stream.pool.quarantined.items()}
        return {**self._stream.store.desk.book.lost, **quarantined}


def open_run(run_dir: str, step: int | None = None) -> RolloutRun:
    """The run of a folder.

    Args:
        step: that will be asked for; None: any.

    Raises:
        ConfigError: it is no run of rollouts, or has no such step.
        EntryError: its groups are gone.
    """
    from raysvc.cache.store.open import absolute
    from raysvc.inspect.replay_run import open_rollouts

    served = read_served(absolute(run_dir), LAST if step is None else step)
    if served is None:
        raise ConfigError(run_dir, f"has no {FILE}", "name the folder of a run, or its job with -c")
    if served.spec.rollouts is None:
        raise ConfigError(run_dir, "is no run of rollouts", "name its job with -c")
    return RolloutRun(served.spec.name, open_rollouts(served.spec, step))
