"""Facts of a page to look at, what lies in a page, and a browser to look with."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from raysvc.collate.plan_report import plan_report
from raysvc.collate.shard_bytes import ColumnBytes
from raysvc.job.config import PlanConfig
from raysvc.plan.plan import Plan
from raysvc.report.browse import BrowsedRows
from raysvc.report.facts import Facts

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
STEPS = [
    {
        "step": i,
        "loss": 5.0 / (i + 1),
        "tokens": 100,
        "step_s": 0.1,
        "stall_s": 0.05 if i == 3 else 0.0,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "input_tokens": 150,
        "cells": 200,
        "stall_by": {"collate": 0.05} if i == 3 else {},
        "by_source": {"chat": [50.0, 20], "<b>": [30.0, 80]},
        "by_length": {"64": [50.0, 20], "128": [30.0, 80], "32": [0.0, 0]},
    }
    for i in range(8)
]


PIECES = {7: b"<|user|>", 8: b"answer ", 9: b".", 101: b"short", 102: b"long"}


def listed(text: str = "hello", *, of_math: str = "math") -> BrowsedRows:
    """Rows of 9, 4, 70 and 5 tokens, the last two trained; of the third the page has ten tokens, of the last one none."""
    held = {9: 100, 4: 101, 10: 102}
    ids = [[7, word, *[9] * (length - 4), 8, word] for length, word in held.items()]
    return BrowsedRows(
        [9, 4, 70, 5], [9, 4, 70, 5], [2, 2, 2, 5], [0, 1, 0, 1], ["chat", of_math], [*held, 0], np.concatenate(ids).astype(np.int32),
        np.concatenate([[False] * (length - 2) + [True] * 2 for length in held]), {100: text.encode(), **PIECES}, 4, frozenset([7]),
        {4: 1.5, 70: 2.5}, {4: [0, 6]},
    )  # fmt: skip


def unpacked(page: str, name: str) -> bytes:
    return zlib.decompress(base64.b64decode(page.partition(f'id="{name}">')[2].partition("<")[0]))


def table_of(page: str) -> dict[str, Any]:
    """What the page's script gets."""
    return dict(json.loads(unpacked(page, "table")))


def tokens_of(page: str) -> list[tuple[int, bool]]:
    """(id, whether it has loss) of every token in a page."""
    table, stream = table_of(page), unpacked(page, "tokens")
    total = sum(table["kept"])
    hits = np.unpackbits(np.frombuffer(stream, np.uint8), count=total).astype(bool).tolist()
    ids, at = [], (total + 7) // 8
    for _ in range(total):
        number = group = 0
        while True:
            number |= (stream[at] & 127) << 7 * group
            group, at = group + 1, at + 1
            if stream[at - 1] < 128:
                break
        ids.append(table["ids"][number])
    assert at == len(stream)
    return list(zip(ids, hits, strict=True))


def facts(text: str = "hello", *, steps: bool = True) -> Facts:
    plan = Plan(PlanConfig(batch_size=4), np.arange(10, 30, dtype=np.int32))
    row_counts = {"rows_in": 22, "rows_written": 20, "dropped": {"too long": 1}, "quarantined": {text: 1}}
    tokens = {"tokens_rendered": 390, "tokens_trained": 200, "tokens_context": 190, "tokens_truncated": 0}
    return Facts(
        title=f"job {text}",
        overview={"rows": 20},
        lengths={"chat": list(range(10, 25)), text: list(range(25, 30))},
        trained={"chat": [0.5] * 15, text: [0.25] * 5},
        rows=replace(listed(text), num_rows=20),
        row_counts={**row_counts, **tokens},
        set_aside=[{"source_row": 7, "reason": text, "detail": "too odd", "text": "{<b>alien}"}],
        plan=plan_report(plan, 2, ColumnBytes(per_cell=13, per_row=24)),
        dp_size=2,
        steps=STEPS if steps else [],
        summary=None,
        evals=[{"step": 4, "eval": "valid", "loss": 1.25}, {"step": 7, "eval": "valid", "loss": 1.0}],
    )


def browse_page(page: Path, folder: Path, width: int) -> tuple[str, str]:
    """(DOM after the scripts, log) of a headless Chromium."""
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--enable-logging=stderr",
    ]
    flags += [
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--virtual-time-budget=4000",
    ]
    command = [str(BROWSER), *flags, f"--window-size={width},900", f"--user-data-dir={folder / 'profile'}"]
    done = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=90, check=True
    )
    return done.stdout, done.stderr
