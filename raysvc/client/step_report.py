"""Tells the trackers of a loop of one's own what it commits.

Always true:
- one rank speaks for all;
- metrics that the loop gives win over those that the client knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from raysvc.errors import ConfigError

if TYPE_CHECKING:
    from raysvc.client.meter import CommittedSteps
    from raysvc.trackers.reporter import Reporter


class StepReport:
    """Holds what an attached loop reports.

    Args:
        reporter: of its trackers.
        steps_per_epoch: for `epoch`.
    """

    def __init__(self, reporter: Reporter, steps_per_epoch: int) -> None:
        self.reporter, self._steps_per_epoch = reporter, steps_per_epoch
        self._input_tokens = 0

    def committed(self, steps: int, told: CommittedSteps, metrics: Mapping[str, float]) -> None:
        """Notes that so many steps are trained."""
        self._input_tokens += told.input_tokens
        known = {
            "epoch": steps / self._steps_per_epoch,
            "num_input_tokens_seen": self._input_tokens,
            "tokens_per_second": told.tokens / max(told.step_s, 1e-9),
            "step_seconds": told.step_s,
            "stall_seconds": told.stall_s,
            "padding_share": told.padding,
            **told.rollouts,
        }
        self.reporter.on_step(steps, known | {name: float(value) for name, value in metrics.items()})


def checked_metrics(metrics: object) -> Mapping[str, float]:
    """Names and numbers; {} for None.

    Raises:
        ConfigError: something else.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise ConfigError("commit(metrics)", f"{metrics!r} is not a mapping of names", "give {'loss': 0.5}")
    for name, value in metrics.items():
        try:
            float(value)
        except (TypeError, ValueError):
            raise ConfigError(
                f"commit(metrics[{name!r}])", f"{value!r} is not a number", "give a number"
            ) from None
    return metrics
