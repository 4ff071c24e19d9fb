"""`raysvc show RUN --step K` of a run of rollouts: the groups of a step, and what became of their turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysvc.cli.common import emit
from raysvc.cli.replay import broken_json, print_broken
from raysvc.cli.view import print_rows

if TYPE_CHECKING:
    from raysvc.inspect.rollout_run import RolloutStep


def show_rollouts(run: str, step: int | None, tokenizer: str | None, as_json: bool) -> None:
    """Print a step.

    Raises:
        ConfigError: no step is named, or the run has no such step.
    """
    from raysvc.errors import ConfigError
    from raysvc.inspect.rollout_run import open_run

    if step is None:
        raise ConfigError("--step", "is missing, and a run of rollouts is shown by steps", "add --step 0")
    opened = open_run(run, step)
    found = opened.step(step)
    if as_json:
        emit(_json(found))
        return
    print_rows(f"Step {step} of {opened.name}", [each.line() for each in found.groups])
    for name, reason in found.gone.items():
        print(f"group {name} is not trained: {reason}")
    told = found.facts
    versions = "" if told is None else f", staleness at most {int(told.metrics()['staleness_max'])}"
    print(f"trained by weights: {found.trained_by}{versions}")
    why = "".join(f"; {count} {reason}" for reason, count in found.apart.items())
    print("turns: " + ", ".join(f"{count} {name}" for name, count in found.turns.items()) + why)
    print_broken(found.broken, tokenizer)


def _json(found: RolloutStep) -> dict[str, object]:
    told = found.facts
    return {
        "step": found.step,
        "trained_by": found.trained_by,
        "groups": [each.to_json() for each in found.groups],
        "gone": dict(found.gone),
        "metrics": {} if told is None else told.metrics(),
        "turns": found.turns,
        "apart": found.apart,
        "broken_turns": broken_json(found.broken),
    }
