"""Collation beside SkyRL 0.3.0, TRL, transformers and a plain numpy fill; packing beside first-fit and round robin.

    python benchmarks/collate.py [--shared FOLDER] [--rows 1024] [--repeats 21] [--no-peers]

Rows are the first ones of GSM8K and SGD, tokenized with Qwen2.5 (`--shared`, default RAYSVC_SHARED or ../shared, holds
`data` and `tokenizers`); without that folder, random rows with the same distributions of lengths. Peers run in an
environment of their own, `.bench/peers`, made when it is not there. Every tool gets its rows in the form it likes best
before the clock starts: ours as flat arrays, the peers as lists of ints. Times are CPU times,
the best of `--repeats` calls, so that other work on the machine disturbs them least; all tools run in one thread.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != HERE]  # it has a tokenize.py

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import subprocess  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402

sys.path.append(str(HERE))

ROOT = HERE.parent
CAPACITY = {"gsm8k": 4096, "sgd": 8192}
DP_SIZE = 8
COLUMNS = ("input_ids", "attention_mask", "position_ids", "labels")
PAD = 151643

Rows = dict[str, np.ndarray]  # ids int32 [T], mask uint8 [T], lengths int64 [N]


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """The best of several calls, ms of CPU time; the first one is not counted."""
    call()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times) * 1e3


# -- rows ---------------------------------------------------------------------------------------------------------


def tokenized(path: Path, tokenizer: Any, num_rows: int) -> Rows:
    """The first rows of a file of chats; what an assistant says, up to its end mark, is trained."""
    begin, end = tokenizer.encode("<|im_start|>assistant\n"), tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids, masks = [], []
    with path.open() as lines:
        for line, _ in zip(lines, range(num_rows), strict=False):
            row = json.loads(line)
            tools = json.loads(row["tools"]) if isinstance(row.get("tools"), str) else row.get("tools")
            flat = np.array(
                tokenizer.apply_chat_template(row["messages"], tools=tools, return_dict=False), np.int32
            )
            mask = np.zeros(len(flat), np.uint8)
            heads = np.flatnonzero(
                np.all([np.roll(flat, -k) == token for k, token in enumerate(begin)], axis=0)
            )
            for head in heads + len(begin):
                mask[head : head + np.argmax(flat[head:] == end) + 1] = 1
            ids.append(flat)
            masks.append(mask)
    return {
        "ids": np.concatenate(ids),
        "mask": np.concatenate(masks),
        "lengths": np.array([len(i) for i in ids]),
    }


def random_rows(name: str, num_rows: int) -> Rows:
    """Rows of random tokens with about the lengths of a data set."""
    median, sigma, low, high = {"gsm8k": (200, 0.33, 100, 570), "sgd": (1000, 0.29, 440, 2010)}[name]
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(median), sigma, num_rows), low, high).astype(np.int64)
    total = int(lengths.sum())
    return {
        "ids": rng.integers(0, 150_000, total).astype(np.int32),
        "mask": np.repeat(rng.random(-(-total // 40)) < 0.5, 40)[:total].astype(np.uint8),
        "lengths": lengths,
    }


def load(shared: Path, num_rows: int) -> tuple[dict[str, Rows], str]:
    """Rows of both data sets, and where they come from."""
    if not (shared / "data").is_dir():
        return {name: random_rows(name, num_rows) for name in CAPACITY}, "random rows"
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(shared / "tokenizers" / "qwen2_5"))
    return {
        name: tokenized(shared / "data" / f"{name}_train.jsonl", tokenizer, num_rows) for name in CAPACITY
    }, "data sets"


def parser_of(doc: str | None, repeats: int) -> argparse.ArgumentParser:
    """What the benchmarks of collation can be told."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared = Path(os.environ.get("RAYSVC_SHARED", ROOT.parent / "shared"))
    parser.add_argument("--shared", type=Path, default=shared)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=repeats)
    return parser


def saved(options: argparse.Namespace) -> tuple[dict[str, Rows], str, Path]:
    """Rows of both data sets, where they come from, and the folder where other processes find them."""
    data, origin = load(options.shared, options.rows)
    folder = ROOT / ".bench" / "collate"
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in data.items():
        np.savez(folder / f"{name}.npz", **rows)
    return data, origin, folder


def in_peers(python: str, script: str, *arguments: str, repeats: int) -> subprocess.CompletedProcess[str]:
    """A script in an environment of peers, in one thread."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [python, script, *arguments, "--repeats", str(repeats)]
    return subprocess.run(command, capture_output=True, text=True, env=env)


def split(values: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    """One list of ints per row."""
    return [part.tolist() for part in np.split(values, np.cumsum(lengths)[:-1])]


# -- ours and the floor -------------------------------------------------------------------------------------------


def ours(rows: Rows, name: str, repeats: int) -> Iterator[tuple[str, str, float]]:
    """(tool, what, ms) of this project: collation alone, and with the planning of the mini-batch."""
    from raysvc.collate.collate import CollateSpec, collate_mini_batch
    from raysvc.job.config import PlanConfig
    from raysvc.plan.plan import Plan
    from raysvc.row_batch import RowBatch

    lengths = rows["lengths"].astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    batch = RowBatch(
        np.arange(len(lengths)), offsets, {"input_ids": rows["ids"], "loss_mask": rows["mask"]}, {}
    )
    shapes = {
        "padded": {"layout": "padded_left"},
        "packed": {"layout": "packed", "micro_batch_tokens": CAPACITY[name]},
    }
    for what, shape in shapes.items():
        for dp_size in (1, DP_SIZE):
            plan = Plan(
                PlanConfig(batch_size=len(lengths), shuffle="none", columns=COLUMNS, **shape), lengths
            )

            def collate(mini: Any, layout: Any = shape["layout"]) -> object:
                return collate_mini_batch(
                    batch,
                    mini,
                    CollateSpec(step=0, mini_index=0, layout=layout, pad_token_id=PAD, columns=COLUMNS),
                )

            [mini] = plan.step(0, dp_size).mini_batches
            yield f"raysvc, {dp_size} ranks", what, milliseconds(lambda mini=mini: collate(mini), repeats)
            both = milliseconds(
                lambda plan=plan, dp=dp_size: collate(plan.step(0, dp).mini_batches[0]), repeats
            )
            yield f"raysvc, {dp_size} ranks, planning too", what, both


def floor(rows: Rows, repeats: int) -> Iterator[tuple[str, str, float]]:
    """(tool, what, ms) of numpy filled row by row: ids alone, and the four arrays that we make."""
    lengths = rows["lengths"].tolist()
    starts = (np.cumsum(rows["lengths"]) - rows["lengths"]).tolist()
    shape = (len(lengths), max(lengths))
    ids, places = rows["ids"], np.arange(shape[1], dtype=np.int32)

    def one() -> object:
        out = np.full(shape, PAD, np.int32)
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            out[row, :length] = ids[start : start + length]
        return out

    def four() -> object:
        out, positions = np.full(shape, PAD, np.int32), np.zeros(shape, np.int32)
        attention, labels = np.zeros(shape, np.uint8), np.full(shape, -100, np.int32)
        targets = np.where(rows["mask"], ids, np.int32(-100))
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            out[row, :length] = ids[start : start + length]
            attention[row, :length] = 1
            positions[row, :length] = places[:length]
            labels[row, :length] = targets[start : start + length]
        return out, attention, positions, labels

    yield "numpy, row by row, ids only", "padded", milliseconds(one, repeats)
    yield "numpy, row by row, four arrays", "padded", milliseconds(four, repeats)


# -- peers --------------------------------------------------------------------------------------------------------


def peers(folder: Path, repeats: int) -> dict[str, list[tuple[str, str, float]]]:
    """Data set -> (tool, what, ms) of every peer, measured in processes of their own."""
    found: dict[str, list[tuple[str, str, float]]] = {}
    from peers import peers_python

    python = peers_python()
    for name in CAPACITY:
        found[name] = []
        for peer in PEER_CALLS:
            path = str(folder / f"{name}.npz")
            done = in_peers(python, __file__, "--peer", peer, path, repeats=repeats)
            if done.returncode:
                print(f"{peer} failed: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                continue
            found[name] += [tuple(row) for row in json.loads(done.stdout.splitlines()[-1])]
    return found


class FakeTokenizer:
    """What the collators of the peers ask of a tokenizer."""

    pad_token_id = PAD
    padding_side = "left"

    def pad(self, encoded: dict[str, Any], **_: Any) -> Any:
        raise AssertionError("these collators pad by themselves")


def skyrl(rows: Rows, name: str, repeats: int) -> list[tuple[str, str, float]]:
    """SkyRL's two collators."""
    import typing

    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[misc]
    from loguru import logger
    from skyrl.train.dataset.collators import DefaultCollator, PackedDataCollator

    logger.remove()
    examples = []
    for ids, mask in zip(
        split(rows["ids"], rows["lengths"]), split(rows["mask"], rows["lengths"]), strict=True
    ):
        first = mask.index(1) if 1 in mask else len(mask) - 1
        examples.append({
            "input_ids": ids, "attention_mask": [1] * len(ids), "num_actions": len(ids) - first, "loss_mask": mask[first:],
        })  # fmt: skip
    padded = DefaultCollator(FakeTokenizer(), 1)
    packed = PackedDataCollator(
        FakeTokenizer(), max_tokens_per_microbatch=CAPACITY[name], tp_size=1, pp_size=1, cp_size=1, dp_size=DP_SIZE,
        batch_size=len(examples), micro_train_batch_size_per_gpu=1,
    )  # fmt: skip
    return [
        ("SkyRL 0.3.0", "padded", milliseconds(lambda: padded(examples, len(examples)), repeats)),
        (
            "SkyRL 0.3.0",
            "packed",
            milliseconds(lambda: packed(examples, len(examples)), max(3, repeats // 5)),
        ),
    ]


def trl(rows: Rows, name: str, repeats: int) -> list[tuple[str, str, float]]:
    """TRL's collator for language modelling, padded and padding-free."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    pairs = zip(split(rows["ids"], rows["lengths"]), split(rows["mask"], rows["lengths"]), strict=True)
    examples = [{"input_ids": ids, "completion_mask": mask} for ids, mask in pairs]
    found = []
    for what, free in (("padded", False), ("packed", True)):
        collator = DataCollatorForLanguageModeling(pad_token_id=PAD, padding_free=free)
        found.append(("TRL", what, milliseconds(lambda c=collator: c(examples), repeats)))
    return found


def transformers(rows: Rows, name: str, repeats: int) -> list[tuple[str, str, float]]:
    """The collators of transformers: padding with labels, and flattening."""
    from tokenizers import Tokenizer, models
    from transformers import DataCollatorForSeq2Seq, DataCollatorWithFlattening, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"p": 0}, "p")), pad_token="p"
    )
    pairs = zip(split(rows["ids"], rows["lengths"]), split(rows["mask"], rows["lengths"]), strict=True)
    examples = [
        {"input_ids": ids, "attention_mask": [1] * len(ids),
         "labels": [token if on else -100 for token, on in zip(ids, mask, strict=True)]}
        for ids, mask in pairs
    ]  # fmt: skip
    plain = [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in examples]
    padded, flat = DataCollatorForSeq2Seq(tokenizer), DataCollatorWithFlattening()
    return [
        (
            "transformers",
            "padded",
            milliseconds(lambda: padded([dict(row) for row in examples]), max(3, repeats // 3)),
        ),
        ("transformers", "packed", milliseconds(lambda: flat(plain), max(3, repeats // 3))),
    ]


PEER_CALLS = {"skyrl": skyrl, "trl": trl, "transformers": transformers}


# -- packing ------------------------------------------------------------------------------------------------------


def packing(rows: Rows, name: str) -> Iterator[dict[str, Any]]:
    """Efficiency of packers, and how even ranks are."""
    from raysvc.plan.cost import CostModel
    from raysvc.plan.pack import pack_first_fit
    from raysvc.plan.rank_plan import Rules, deal

    lengths, capacity, cost = rows["lengths"].astype(np.int32), CAPACITY[name], CostModel()

    def line(tool: str, ranks: list[np.ndarray], packs: int) -> dict[str, Any]:
        def uneven(values: list[int]) -> float:
            return max(values) / (sum(values) / len(values))

        return {
            "rows": name,
            "packing": tool,
            "packs": packs,
            "efficiency": int(lengths.sum()) / (packs * capacity),
            "tokens max/mean": uneven([int(lengths[rank].sum()) for rank in ranks]),
            "cost max/mean": uneven([int(cost.of(lengths[rank]).sum()) for rank in ranks]),
            "sum of L^2 max/mean": uneven(
                [int((lengths[rank].astype(np.int64) ** 2).sum()) for rank in ranks]
            ),
        }

    bins = pack_first_fit(lengths.astype(np.int64), capacity)
    missing = -len(bins) % DP_SIZE
    for _ in range(missing):  # what SkyRL does: the last sequence of the packs with most sequences moves out
        bins.append([max(bins, key=len).pop()])
    dealt = [np.array([row for pack in bins[rank::DP_SIZE] for row in pack]) for rank in range(DP_SIZE)]
    yield line("first-fit decreasing, round robin", dealt, len(bins))
    for packing_ in ("first_fit", "best_fit", "balanced"):
        plans = deal(lengths, DP_SIZE, Rules("packed", None, capacity, packing=packing_))
        count = sum(len(plan.lines) - 1 for plan in plans)
        yield line(f"raysvc, {packing_}", [plan.rows[plan.rows >= 0] for plan in plans], count)


def main() -> None:
    parser = parser_of(__doc__, repeats=21)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--peer", nargs=2, metavar=("NAME", "ROWS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        name, path = options.peer
        rows = dict(np.load(path))
        print(json.dumps(PEER_CALLS[name](rows, Path(path).stem, options.repeats)))
        return

    from common import show

    data, origin, folder = saved(options)
    theirs = {} if options.no_peers else peers(folder, options.repeats)
    table, packed = [], []
    for name, rows in data.items():
        tokens = int(rows["lengths"].sum())
        results = [*theirs.get(name, []), *floor(rows, options.repeats), *ours(rows, name, options.repeats)]
        base = {what: ms for tool, what, ms in results if tool.startswith("SkyRL")}
        for tool, what, ms in results:
            times = base[what] / ms if what in base else None
            table.append(
                {
                    "rows": name,
                    "what": what,
                    "tool": tool,
                    "ms": ms,
                    "Mtok/s": tokens / ms / 1e3,
                    "times SkyRL": times,
                }
            )
        packed += packing(rows, name)
    show(f"Collating {options.rows} rows ({origin})", table)
    show(f"Packing {options.rows} rows for {DP_SIZE} ranks ({origin})", packed, capacity=CAPACITY)


if __name__ == "__main__":
    main()
