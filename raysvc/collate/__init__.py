"""Rows into arrays: layouts, dummies, denominators, loss weights."""

from raysvc.collate.collate import collate_mini_batch
from raysvc.collate.info import MiniBatchInfo, info_of
from raysvc.collate.loss import row_weights, token_weights
from raysvc.collate.shard import Denominators, MicroBatch, Shard

__all__ = [
    "Denominators",
    "MicroBatch",
    "MiniBatchInfo",
    "Shard",
    "collate_mini_batch",
    "info_of",
    "row_weights",
    "token_weights",
]
