"""transformers' Trainer with `ignore_data_skip`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_trainer import IMPORTS as IMPORTS
from hf_trainer import NOT_OFFERED as NOT_OFFERED
from hf_trainer import VERSION as VERSION
from hf_trainer import Loader

PROMISE = "ignore_data_skip: begins sooner, and does not yield the results that the interrupted training would have had"
SETTINGS = "as hf_trainer, ignore_data_skip=True"


def open_loader(rows: Path, **options: Any) -> Loader:
    return Loader(rows, options, ignore_data_skip=True)
