"""Collation beside SkyRL's: the same rows, in one process, pinned to a core, each tool's calls in turn.

    python benchmarks/collate_skyrl.py [--skyrl CHECKOUT] [--shared FOLDER] [--rows 1024] [--repeats 15]

SkyRL is 0.3.0 from PyPI, or what is built of a checkout. It gets lists of ints, as its tokenization makes them, and gives a
`TrainingInputBatch`; ours gets flat arrays, as an entry has them, and gives the shards of 8 ranks (`shards`), or 8 `TrainingInputBatch`es
(`batches`, what the server and the workers do for a role with `BatchRules`). The process keeps freed memory as a server's does (`keep_freed_memory`). Times are CPU times of
a call, in million tokens per second:
- `best`: each result is dropped before the next call, and its memory is used again; the best call;
- `first touch`: results are kept, so each call writes memory that no process had before; the median call;
- `server`: two threads make steps that are copied out and let go, as in a server; the median step, and its page faults.
The floor is one value written into all bytes of the batches, a rank's after another's into one block.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != HERE]  # it has a tokenize.py

import argparse  # noqa: E402
import inspect  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import pickle  # noqa: E402
import resource  # noqa: E402
import statistics  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from concurrent.futures import ThreadPoolExecutor  # noqa: E402
from types import SimpleNamespace  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402

sys.path.append(str(HERE))

from collate import CAPACITY, DP_SIZE, PAD, Rows, in_peers, parser_of, saved, split  # noqa: E402

RESPONSES = ("rewards", "rollout_logprobs")
SHAPES = {
    "padded": {"layout": "padded_left"},
    "packed": {"layout": "packed"},
    "responses": {"layout": "padded_left"},
}


def in_turn(calls: dict[str, Callable[[], object]], repeats: int, keep: bool) -> dict[str, list[float]]:
    """Name -> seconds of CPU of each call; `keep`: no result goes before the end."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    kept = []
    for number in range(repeats + 1):
        for name, call in calls.items():
            begin = time.process_time()
            made = call()
            if number:  # the first round warms caches of code
                times[name].append(time.process_time() - begin)
            if keep:
                kept.append(made)
            del made
    return times


def first_targets(rows: Rows) -> np.ndarray:
    """int64 [N], tokens before the first target of each row; all but one where there is none."""
    masks = np.split(rows["mask"], np.cumsum(rows["lengths"])[:-1])
    return np.array([int(mask.argmax()) if mask.any() else len(mask) - 1 for mask in masks])


def ours(rows: Rows, name: str, what: str) -> dict[str, Callable[[], object]]:
    """Ways that make shards, and batches."""
    from raysvc.collate.collate import CollateSpec, collate_mini_batch
    from raysvc.integrations.skyrl import BatchRules
    from raysvc.integrations.skyrl_tensors import training_batch
    from raysvc.job.config import PlanConfig
    from raysvc.plan.plan import Plan
    from raysvc.row_batch import RowBatch

    lengths = rows["lengths"].astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens: dict[str, Any] = {"input_ids": rows["ids"], "loss_mask": rows["mask"]}
    per_row: dict[str, Any] = {}
    if what == "responses":
        tokens |= {column: np.ones(len(rows["ids"]), np.float32) for column in RESPONSES}
        per_row["prompt_tokens"] = np.maximum(first_targets(rows), 1).astype(np.int32)
    names = (*tokens, *per_row)
    shape = {**SHAPES[what], **({"micro_batch_tokens": CAPACITY[name]} if what == "packed" else {})}
    batch = RowBatch(np.arange(len(lengths)), offsets, tokens, per_row)
    plan = Plan(PlanConfig(batch_size=len(lengths), shuffle="none", columns=names, **shape), lengths)
    [mini] = plan.step(0, DP_SIZE).mini_batches

    how = {"step": 0, "mini_index": 0, "layout": plan.config.layout, "pad_token_id": PAD, "columns": names}
    rules = BatchRules()

    def shards() -> Any:
        return collate_mini_batch(batch, mini, CollateSpec(**how))

    def batches() -> object:
        made = rules.collate(batch, mini, CollateSpec(**how))
        for shard in made[:-1]:
            training_batch(shard)  # a rank's process has its own alone
        return made, training_batch(made[-1])

    return {"raysvc, shards": shards, "raysvc, batches": batches}


def theirs(rows: Rows, name: str, what: str) -> Callable[[], object]:
    """SkyRL's way to a batch."""
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
    from skyrl.train.dataset.collators import DefaultCollator, PackedDataCollator
    from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors

    ids, masks = (split(rows[column], rows["lengths"]) for column in ("ids", "mask"))
    tokenizer = SimpleNamespace(pad_token_id=PAD)
    firsts = np.maximum(first_targets(rows), 1).tolist()
    if what == "responses":
        prompts, responses = (
            [row[:first] for row, first in zip(ids, firsts, strict=True)],
            [row[first:] for row, first in zip(ids, firsts, strict=True)],
        )
        loss = [row[first:] for row, first in zip(masks, firsts, strict=True)]
        ones = [[1.0] * len(row) for row in responses]
        begin: Any = tokenizer  # 0.3.0 takes a tokenizer, later ones the id
        if (
            next(iter(inspect.signature(convert_prompts_responses_to_batch_tensors).parameters))
            == "pad_token_id"
        ):
            begin = PAD

        def call() -> object:
            made = convert_prompts_responses_to_batch_tensors(begin, prompts, responses, ones, loss, ones)
            names = (
                "sequences",
                "attention_mask",
                "response_mask",
                "rewards",
                "loss_mask",
                "rollout_logprobs",
            )
            return TrainingInputBatch(dict(zip(names, made, strict=False)))

        return call
    examples = [
        {"input_ids": row, "attention_mask": [1] * len(row), "num_actions": len(row) - first, "loss_mask": mask[first:]}
        for row, mask, first in zip(ids, masks, firsts, strict=True)
    ]  # fmt: skip
    if what == "padded":
        collator: Any = DefaultCollator(tokenizer, 1)
    else:
        collator = PackedDataCollator(
            tokenizer, max_tokens_per_microbatch=CAPACITY[name], tp_size=1, pp_size=1, cp_size=1, dp_size=DP_SIZE,
            batch_size=len(examples), micro_train_batch_size_per_gpu=1,
        )  # fmt: skip
    return lambda: collator(examples, len(examples))


def floor(batch: Any) -> Callable[[], object]:
    """Writes the bytes of a `TrainingInputBatch` of all ranks."""
    size = sum(getattr(value, "nbytes", 0) for value in batch.values()) // DP_SIZE
    kept = np.empty(size, np.uint8)

    def call() -> object:
        for _ in range(DP_SIZE):
            kept.fill(1)
        return None

    return call


def in_one_process(folder: Path, repeats: int) -> list[dict[str, Any]]:
    """All cases; to be run where SkyRL is."""
    import typing

    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[misc]  # what skyrl needs on Python 3.11
    import torch
    from loguru import logger

    from raysvc.collate.reused_memory import keep_freed_memory

    logger.remove()
    torch.set_num_threads(1)
    keep_freed_memory()  # as a server does
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    found = []
    for name in CAPACITY:
        rows: Rows = dict(np.load(folder / f"{name}.npz"))
        tokens = int(rows["lengths"].sum())
        for what in SHAPES:
            skyrl = theirs(rows, name, what)
            calls = {"SkyRL": skyrl, **ours(rows, name, what), "floor": floor(skyrl())}
            best = {tool: min(times) for tool, times in in_turn(calls, repeats, keep=False).items()}
            fresh = {
                tool: statistics.median(times)
                for tool, times in in_turn(calls, max(3, repeats // 3), keep=True).items()
            }
            server_s, faults = served(calls["raysvc, shards"], 2 * repeats)
            in_server = {"server": tokens / server_s / 1e6, "page faults": faults}
            found += [
                {
                    "rows": name,
                    "what": what,
                    "tool": tool,
                    "best": tokens / best[tool] / 1e6,
                    "times SkyRL": best["SkyRL"] / best[tool],
                    "first touch": tokens / fresh[tool] / 1e6,
                    "times SkyRL, first touch": fresh["SkyRL"] / fresh[tool],
                    **(in_server if tool == "raysvc, shards" else {}),
                }
                for tool in calls
            ]
    return found


def served(collate: Callable[[], Any], steps: int) -> tuple[float, float]:
    """Median seconds of CPU of a step, and page faults a step, where two threads make steps as a server's do.

    Each step is copied into memory that is there, as Ray copies it into its object store, and then let go.
    """
    place = bytearray(256 << 20)

    def step(_: int) -> float:
        begin = time.thread_time()
        made = collate()
        seconds = time.thread_time() - begin
        buffers: list[pickle.PickleBuffer] = []
        pickle.dumps([shard.to_wire() for shard in made], protocol=5, buffer_callback=buffers.append)
        start = 0
        for buffer in buffers:
            raw = buffer.raw()
            place[start : start + len(raw)] = raw
            start += len(raw)
        return seconds

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(step, range(6)))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        seconds = statistics.median(pool.map(step, range(steps)))
        return seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / steps


def main() -> None:
    parser = parser_of(__doc__, repeats=15)
    parser.add_argument("--skyrl", type=Path, help="a checkout of SkyRL, in place of 0.3.0")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(in_one_process(options.inside, options.repeats)))
        return

    from common import show
    from peers import peers_python

    _, origin, folder = saved(options)
    python = peers_python(skyrl=options.skyrl)
    done = in_peers(python, __file__, "--inside", str(folder), repeats=options.repeats)
    if done.returncode:
        sys.exit(done.stderr)
    table = json.loads(done.stdout.splitlines()[-1])
    skyrl = "main" if options.skyrl else "0.3.0"
    show(f"Collating {options.rows} rows for {DP_SIZE} ranks beside SkyRL {skyrl} ({origin}), Mtok/s", table)


if __name__ == "__main__":
    main()
