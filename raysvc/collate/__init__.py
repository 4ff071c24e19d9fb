"""Rows into arrays: layouts, dummies, denominators, loss weights; and what a plan will cost."""

from raysvc.collate.collate import collate_mini_batch
from raysvc.collate.info import MiniBatchInfo, info_of
from raysvc.collate.loss_weights import loss_scale, row_weights, sequence_weights, token_weights
from raysvc.collate.plan_report import PlanReport, StepRow, plan_report, rows_of_step
from raysvc.collate.shard import Denominators, MicroBatch, Shard, read_shard

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
