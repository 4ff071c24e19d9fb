"""A run that reports the losses of its rows, and starves the sources of its mixture whose loss stays high (`mixture.adapt`).

1. The losses of the rows of each step are reported with it, for `raysvc why` too.
2. When the steps [k - n, k) are trained, n being `every_steps`, their losses are looked at, as they were first reported.
3. What follows from them holds from step k + n on: the steps until then may have been handed out already.

Always true:
- a run that was killed, and goes on on as many ranks as it likes, decides as the one that was not: by what was reported first;
- before all sources have joined nothing is decided;
- a source is starved when its mean loss is above a factor times the median of those of the others that still come; a loss of NaN is
  above every other; one source is left at least, and a source of which nothing was trained is not judged.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from raysvc.errors import ConfigError

if TYPE_CHECKING:
    from raysvc.actors.worker.results import MiniResult
    from raysvc.builds.cache_entry import CacheEntry
    from raysvc.client.batch_client import BatchClient
    from raysvc.job.config import MixtureConfig

log = logging.getLogger(__name__)


class MixtureAdapter:
    """See the module; a run without `mixture.adapt` only reports.

    Args:
        mixture: of the job.
        entry: whose rows they are, with the numbers of the plan.
        alone: the server has one trainer, which may report.
    """

    def __init__(self, mixture: MixtureConfig | None, entry: CacheEntry, *, alone: bool = True) -> None:
        self._mixture, self._entry, self._alone = mixture, entry, alone
        self._adapt = mixture.adapt if mixture is not None else None

    def report(
        self, client: BatchClient, step: int, num_minis: int, results: Sequence[Sequence[MiniResult]]
    ) -> None:
        """Report the losses of a trained step, of its first pass.

        Args:
            num_minis: of the step.
            results: results[dp rank][optimizer step].

        Raises:
            ConfigError: the workers do not say the losses of rows.
        """
        if self._adapt is None and not self._alone:
            return
        rows = [mini.rows for rank in results for mini in rank[:num_minis] if mini.rows is not None]
        if not rows and self._adapt is None:
            return
        if not rows:
            what = "needs the loss of each row, and this objective has none"
            raise ConfigError("mixture.adapt", what, "leave it out, or train another objective")
        row_ids = np.concatenate([one.row_ids for one in rows])
        order = np.argsort(row_ids, kind="stable")  # so that the report does not depend on ranks
        columns = {
            name: np.concatenate([one.rows[name] for one in rows])[order] for name in ("loss", "targets")
        }
        client.report_rows(step, row_ids[order], **columns)

    def decide(self, client: BatchClient, done: int) -> None:
        """Look at the last steps, where it is time to.

        Args:
            done: trained steps.
        """
        if self._adapt is None or self._mixture is None or done % self._adapt.every_steps:
            return
        every, sources = self._adapt.every_steps, self._mixture.sources
        from_step = done + every
        if from_step >= client.schedule.num_steps or from_step < max(
            one.from_step for one in sources.values()
        ):
            return
        weights = {name: one.weight or 0.0 for name, one in sources.items()}
        for one in client.decisions:
            if one["weights"] is not None and one["from_step"] < from_step:
                weights = {**weights, **one["weights"]}
        told = client.decisions.row_outcomes(done - every, done)
        names = np.array(self._entry.sources_of(told.row_ids))
        losses = {
            name: (
                float(told.columns["loss"][names == name].sum(dtype=np.float64)),
                int(told.columns["targets"][names == name].sum()),
            )
            for name in sources
        }
        changed = starved(weights, losses, self._adapt.starve_above)
        if changed is not None:
            client.decisions.set_mixture_weights(changed, from_step=from_step)
            gone = [name for name, weight in changed.items() if weight < weights[name]]
            log.warning("starved sources=%s from_step=%d losses=%s", ",".join(gone), from_step, losses)


def starved(
    weights: Mapping[str, float], losses: Mapping[str, tuple[float, int]], above: float
) -> dict[str, float] | None:
    """Weights without the sources that are too bad; None: they stay as they are.

    Args:
        weights: of all sources.
        losses: source -> sum of losses, and the targets (or pairs) that they are of.
        above: the factor.
    """
    means = {
        name: _mean(*losses[name])
        for name, weight in weights.items()
        if weight > 0 and losses.get(name, (0.0, 0))[1] > 0
    }
    bad = [name for name, mean in means.items() if not _is_fit(name, mean, means, above)]
    left = {name: 0.0 if name in bad else weight for name, weight in weights.items()}
    return left if bad and any(left.values()) else None


def _mean(total: float, targets: int) -> float:
    return math.inf if math.isnan(total) else total / targets


def _is_fit(name: str, mean: float, means: Mapping[str, float], above: float) -> bool:
    others = [other for each, other in means.items() if each != name]
    return not others or mean <= above * statistics.median(others)
