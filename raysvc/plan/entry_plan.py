"""The plan over the rows of cache entries, and that of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from raysvc.config import PlanConfig
from raysvc.plan.mixture import Mixture, MixtureSource, Stage
from raysvc.plan.order import parse_shuffle
from raysvc.plan.plan import Plan


class Rows(Protocol):
    """What a plan asks of an entry."""

    @property
    def key(self) -> str:
        """Hash of what decides the rows."""

    @property
    def num_rows(self) -> int:
        """How many rows there are."""


def plan_of_entries(
    config: PlanConfig,
    entries: Sequence[Rows],
    lengths: npt.NDArray[np.integer[Any]],
    stages: Sequence[tuple[int, tuple[int, ...]]] = (),
) -> Plan:
    """The plan over the rows of `entries`, one after the other.

    Args:
        config: section `plan` of a job.
        entries: one, or those of a mixture.
        lengths: [N], tokens of each row of all entries.
        stages: of a mixture, see `raysvc.plan.mixture`; none for a single entry.
    """
    mixture = None
    if stages:
        sources = tuple(MixtureSource(one.key, one.num_rows) for one in entries)
        order = config.seed, parse_shuffle(config.shuffle)
        mixture = Mixture(sources, tuple(Stage(*stage) for stage in stages), *order)
    return Plan(config, lengths, entry_keys=[one.key for one in entries], mixture=mixture)


def eval_plan(config: PlanConfig, batch_size: int) -> PlanConfig:
    """The plan of an eval: every row once, in the order of the entry, in the shape of training."""
    return config.model_copy(
        update={
            "batch_size": batch_size,
            "mini_batch_size": None,
            "epochs": 1,
            "update_epochs": 1,
            "shuffle": "none",
            "tail": "pad",
            "skip_rows": (),
        }
    )
