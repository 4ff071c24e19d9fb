"""What merging turns saves, and what looking for turns costs where there are none.

    python benchmarks/turns.py [FOLDER_WITH_DATA_AND_TOKENIZERS]

- turns: real multi-turn rollouts (tau-bench airline, Qwen2.5's tokenizer), a row per assistant message; made into the shards of two
  ranks with `rows: keep` and with `rows: merge`;
- samples: 64 prompts of eight answers that nobody continues: the same step with and without looking.
Times are of the first time that a step is made, the least of three.

Figures (11-27): 4.5 M tokens of tau-bench become 0.44 M, 10.2 times less than a row per turn; 94 k tokens a ms are searched.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from common import show

PLAN = {"layout": "packed", "micro_batch_tokens": 16384}
COLUMNS = ("input_ids", "labels", "position_ids", "advantages", "old_logprobs")


def turns_of(folder: Path) -> list[Any]:
    """A group per prompt."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizers" / "qwen2_5" / "tokenizer.json"))
    lines = (folder / "data" / "tau_airline_rollouts.jsonl").read_text().splitlines()
    by_uid: dict[str, tuple[list[Any], list[Any], list[int]]] = {}
    for number, line in enumerate(map(json.loads, lines)):
        ids, masks, trajectories = by_uid.setdefault(line["uid"], ([], [], []))
        history: list[int] = []
        for message in line["messages"]:
            text = str(message.get("content") or json.dumps(message.get("tool_calls")))
            own = tokenizer.encode(
                f"<|im_start|>{message['role']}\n{text}<|im_end|>\n", add_special_tokens=False
            ).ids
            if message["role"] == "assistant":
                ids.append([*history, *own])
                masks.append([0] * len(history) + [1] * len(own))
                trajectories.append(number)
            history += own
    return [_group(uid, *rows) for uid, rows in by_uid.items()]


def samples() -> list[Any]:
    """64 prompts of 500 tokens, eight answers each."""
    rng = np.random.default_rng(0)
    groups = []
    for number in range(64):
        prompt = rng.integers(2, 30000, 500).tolist()
        ids = [prompt + rng.integers(2, 30000, int(rng.integers(100, 1500))).tolist() for _ in range(8)]
        groups.append(_group(f"g{number}", ids, [[0] * 500 + [1] * (len(each) - 500) for each in ids], None))
    return groups


def _group(uid: str, ids: list[Any], masks: list[Any], trajectory: list[int] | None) -> Any:
    from raysvc.rl.group import Group

    zeros = [np.zeros(len(each), np.float32) for each in ids]
    return Group(uid, ids, masks, tokens={"advantages": zeros, "old_logprobs": zeros}, trajectory=trajectory)


def made(groups: Sequence[Any], rows: str) -> dict[str, Any]:
    """A step of all groups."""
    from raysvc.actors.rollouts.rollout_stream import RolloutStream
    from raysvc.actors.server.make_step import Recipe
    from raysvc.actors.server.spec import RolloutSpec
    from raysvc.job.config import PlanConfig
    from raysvc.rl.group_table import table_of

    plan, table, best_s = (
        PlanConfig(batch_size=len(groups), columns=COLUMNS, **PLAN),
        table_of(groups),
        float("inf"),
    )
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            spec = RolloutSpec(max_staleness=None, rows=rows)
            stream = RolloutStream("bench", spec, Recipe(plan, 1), folder, {})
            stream.put(table)
            stream.form(0, 0)
            begin = time.perf_counter()
            info, shards = stream.make(0, (2,))
            best_s = min(best_s, time.perf_counter() - begin)
    [mini] = info.mini_batches
    return {
        "rows": len(mini.row_ids),
        "tokens": int(mini.lengths.sum()),
        "MB of shards": round(sum(shard.nbytes for shard in shards) / 1e6, 1),
        "ms": round(1e3 * best_s, 1),
    }


def search_ms(groups: Sequence[Any]) -> float:
    """Looking for turns alone."""
    from raysvc.rl.turns import TurnRows, find_turns

    best_s = float("inf")
    for _ in range(3):
        total_s = 0.0
        for group in groups:
            ids = [np.array(each, np.int32) for each in group.input_ids]
            targets = [np.array(each, np.bool_) for each in group.loss_mask]
            whole = {} if group.trajectory is None else {"trajectory": np.array(group.trajectory)}
            begin = time.perf_counter()
            find_turns(TurnRows(ids, targets, {}, whole))
            total_s += time.perf_counter() - begin
        best_s = min(best_s, total_s)
    return 1e3 * best_s


def main() -> None:
    """See the module."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "../shared")
    cases = {"samples": samples()}
    if (folder / "data" / "tau_airline_rollouts.jsonl").exists():
        cases["turns"] = turns_of(folder)
    else:
        print(f"{folder} has no data/tau_airline_rollouts.jsonl: samples alone")
    table = []
    for name, groups in cases.items():
        per_ms = sum(len(each) for group in groups for each in group.input_ids) / search_ms(groups)
        for rows in ("keep", "merge"):
            searched = {"tokens searched a ms": round(per_ms)} if rows == "merge" else {}
            table.append({"case": name, "rows:": rows, **made(groups, rows), **searched})
    show("Turns", table)


if __name__ == "__main__":
    main()
