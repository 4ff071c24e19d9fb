"""The loaders that stand beside raysvc in `serve.py`, each as its documentation has it, over the same Arrow parts.

- torchdata: StatefulDataLoader, two workers that read the parts and pad with torch, two batches ahead each;
- Ray Data: `iter_torch_batches` with the same padding, two batches ahead.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parents[1] / ".bench" / "serve"


class Rows:
    """A map-style dataset over the entry's rows, as a user writes one."""

    def __init__(self, uri: str) -> None:
        self.uri, self.entry = uri, None

    def __len__(self) -> int:
        from raysvc.cache.find import open_finished

        return open_finished(self.uri).num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.entry is None:
            from raysvc.cache.find import open_finished

            self.entry = open_finished(self.uri)
        batch = self.entry.read(self.entry.row_ids(index, index + 1))
        return {"input_ids": batch.tokens["input_ids"], "loss_mask": batch.tokens["loss_mask"]}


def padded(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The four arrays that raysvc makes, by torch."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids = [torch.tensor(row["input_ids"]) for row in rows]
    labels = [
        torch.where(torch.tensor(row["loss_mask"]) > 0, each, -100)
        for row, each in zip(rows, ids, strict=True)
    ]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(each) for each in ids], batch_first=True),
        "position_ids": pad_sequence([torch.arange(len(each)) for each in ids], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def torchdata(uri: str, batch_size: int) -> Iterator[Any]:
    if not BENCH.exists():
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--target",
            str(BENCH),
            "torchdata",
        ]
        subprocess.run(command, check=True)
    sys.path.append(str(BENCH))
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(
        Rows(uri), batch_size=batch_size, shuffle=True, num_workers=2, collate_fn=padded,
        multiprocessing_context="forkserver", persistent_workers=True,
    )  # fmt: skip
    while True:
        yield from loader


def ray_data(uri: str, batch_size: int) -> Iterator[Any]:
    import pyarrow as pa
    import ray

    ray.data.DataContext.get_current().enable_progress_bars = False
    tables = [
        pa.ipc.open_stream(pa.memory_map(str(path))).read_all() for path in sorted(Path(uri).glob("*.arrow"))
    ]
    data = ray.data.from_arrow(tables).select_columns(["input_ids", "loss_mask"])

    def collate(batch: dict[str, Any]) -> dict[str, Any]:
        return padded([{"input_ids": i, "loss_mask": m} for i, m in zip(*batch.values(), strict=True)])

    while True:
        yield from data.iter_torch_batches(
            batch_size=batch_size, collate_fn=collate, prefetch_batches=2, drop_last=True
        )
