"""An entry as a `datasets.Dataset` that TRL trains on as it is. Extra: `raysvc[trl]`.

Always true:
- `labels` are -100 exactly where our `loss_mask` is 0; the first token of a row is never a target;
- the Arrow parts are mapped, not copied: labels are made when a row is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from raysvc.collate.columns import IGNORED

if TYPE_CHECKING:
    from datasets import Dataset


def labelled(uri: str, storage_options: Mapping[str, Any] | None = None) -> Dataset:
    """The rows of a finished entry as `input_ids` and `labels`.

    Give it to `SFTTrainer` with `dataset_kwargs={"skip_prepare_dataset": True}` (the ids stay ours) and
    `remove_unused_columns=False` (the mask is read before it is dropped).
    """
    from datasets import load_from_disk

    return load_from_disk(uri, storage_options=dict(storage_options or {}) or None).with_transform(_labelled)


def _labelled(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    labels = [
        [
            token if trained and place else IGNORED
            for place, (token, trained) in enumerate(zip(*row, strict=True))
        ]
        for row in zip(rows["input_ids"], rows["loss_mask"], strict=True)
    ]
    return {"input_ids": rows["input_ids"], "labels": labels}
