"""The trackers that have a name, and what has to be installed for each."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Literal

from raysvc.errors import ConfigError
from raysvc.trackers.tracker import TrackedRun, Tracker

TrackerName = Literal["wandb", "tensorboard", "mlflow", "trackio"]
CLASSES: dict[str, str] = {
    "wandb": "WandbTracker",
    "tensorboard": "TensorBoardTracker",
    "mlflow": "MlflowTracker",
    "trackio": "TrackioTracker",
}


def check_installed(names: Sequence[str], where: str = "trainer.report_to") -> None:
    """Refuse a name that is unknown, or whose package is missing; imports nothing.

    Raises:
        ConfigError: says what to install.
    """
    for name in names:
        if name not in CLASSES:
            raise ConfigError(where, f"unknown tracker {name!r}", f"give one of {', '.join(CLASSES)}")
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # no origin: a folder of that name, like that of wandb's runs
            raise ConfigError(where, f"{name} is not installed", f"pip install 'raysvc[{name}]'")


def open_tracker(name: str, run: TrackedRun, where: str = "trainer.report_to") -> Tracker:
    """A tracker by its name.

    Raises:
        ConfigError: it is not installed, or cannot be opened.
    """
    check_installed([name], where)
    try:
        made: Tracker = getattr(importlib.import_module(f"raysvc.trackers.{name}"), CLASSES[name])(run)
    except Exception as error:  # of a foreign package: anything; the user decides to fix it or to do without
        raise ConfigError(where, f"{name}: {first_line(error)}", f"fix that, or leave {name} out") from error
    return made


def first_line(error: BaseException) -> str:
    """Type and first line of an error, for one line of ours."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
