"""Rows into arrays: layouts, dummies, denominators, loss weights; and what a plan will cost.

Always true:
- who asks for one name, or one file of this folder, loads no other.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raysvc.collate.collate import collate_mini_batch
    from raysvc.collate.info import MiniBatchInfo, info_of
    from raysvc.collate.loss_weights import loss_scale, row_weights, sequence_weights, token_weights
    from raysvc.collate.plan_report import PlanReport, StepRow, plan_report, rows_of_step
    from raysvc.collate.shard import Denominators, MicroBatch, Shard, read_shard

_HOMES = {
    "Denominators": "raysvc.collate.shard",
    "MicroBatch": "raysvc.collate.shard",
    "MiniBatchInfo": "raysvc.collate.info",
    "PlanReport": "raysvc.collate.plan_report",
    "Shard": "raysvc.collate.shard",
    "StepRow": "raysvc.collate.plan_report",
    "collate_mini_batch": "raysvc.collate.collate",
    "info_of": "raysvc.collate.info",
    "loss_scale": "raysvc.collate.loss_weights",
    "plan_report": "raysvc.collate.plan_report",
    "read_shard": "raysvc.collate.shard",
    "row_weights": "raysvc.collate.loss_weights",
    "rows_of_step": "raysvc.collate.plan_report",
    "sequence_weights": "raysvc.collate.loss_weights",
    "token_weights": "raysvc.collate.loss_weights",
}
__all__ = [
    "Denominators",
    "MicroBatch",
    "MiniBatchInfo",
    "PlanReport",
    "Shard",
    "StepRow",
    "collate_mini_batch",
    "info_of",
    "loss_scale",
    "plan_report",
    "read_shard",
    "row_weights",
    "rows_of_step",
    "sequence_weights",
    "token_weights",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
