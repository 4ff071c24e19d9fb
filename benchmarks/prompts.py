"""What a stream of prompts costs: asking, putting and verdicts, and what is left on disk and in memory.

    python benchmarks/prompts.py [NUM_PROMPTS]

Four producers in one process loop over `producer.prompts()` and put a group of two short rows for each; a trainer takes steps of 64
groups, tells its version and forgets what is behind it. Then as many groups of own uids: `reserve` one, put it, through another server.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from common import quiet_ray, show

BATCH, PRODUCERS = 64, 4
Times = dict[str, list[float]]


def job_of(folder: Path, count: int) -> dict[str, Any]:
    """Prompts of one word."""
    from raysvc.cli.sample_data import chat_rows, row_texts, write_tokenizer

    rows = folder / "prompts.jsonl"
    with rows.open("w") as file:
        for number in range(count):
            file.write(
                json.dumps(
                    {"prompt": [{"role": "user", "content": f"question {number}"}], "answer": str(number)}
                )
                + "\n"
            )
    tokenizer = write_tokenizer(folder / "tokenizer", row_texts(chat_rows(200)), vocab_size=512)
    return {
        "source": {"path": str(rows), "format": "prompt", "carry": ["answer"]},
        "tokenizer": {"name": str(tokenizer)},
        "cache": {"root": str(folder / "cache")},
    }


def timed(times: list[float], call: Callable[[], Any]) -> Any:
    """The result of a call, whose seconds are noted."""
    begin = time.perf_counter()
    result = call()
    times.append(time.perf_counter() - begin)
    return result


def group_of(uid: str, attempt: int, version: int) -> Any:
    from raysvc import Group

    ids = np.arange(1, 33, dtype=np.int32)
    return Group(uid, [ids, ids + 1], [np.ones(32, np.uint8)] * 2, attempt=attempt, weight_version=version)


def of_stream(name: str, times: Times, count: int) -> None:
    """One producer of a server with prompts."""
    import raysvc

    producer = raysvc.rollouts(name)
    for prompt in producer.prompts():
        timed(
            times["put"],
            lambda made=group_of(prompt.uid, prompt.attempt, prompt.weight_version): producer.put_groups(
                made
            ),
        )


def of_uids(name: str, times: Times, uids: Iterator[str]) -> None:
    """One producer of a server without."""
    import raysvc

    producer = raysvc.rollouts(name)
    for uid in uids:
        for attempt in itertools.count():
            while not timed(
                times["ask"], lambda uid=uid, attempt=attempt: producer.reserve([uid], attempt=attempt)
            ):
                time.sleep(0.005)
            made = group_of(uid, attempt, producer.stats()["weight_version"])
            if timed(times["put"], lambda made=made: producer.put_groups(made)).verdicts[uid] == "new":
                break


def run(folder: Path, name: str, count: int, prompts: Any | None) -> dict[str, Any]:
    """All prompts through one server."""
    import raysvc
    from raysvc.actors.launch import stop_server
    from raysvc.client.rl.rollouts import Rollouts

    plan = {"batch_size": BATCH, "columns": ("input_ids", "labels")}
    raysvc.serve_rollouts(
        name, run_dir=str(folder / name), pad_token_id=0, plan=plan, prompts=prompts, num_cpus=0
    )
    times: Times = {"ask": [], "put": []}
    if prompts is not None:
        call = Rollouts._call

        def asked(self: Any, method: str, *args: Any, **named: Any) -> Any:
            if method != "prompts":
                return call(self, method, *args, **named)
            return timed(times["ask"], lambda: call(self, method, *args, **named))

        Rollouts._call = asked  # type: ignore[method-assign]
    numbers = (f"u{number}" for number in itertools.islice(itertools.count(), count))
    shared = _Locked(numbers)
    work: Any = (
        (lambda: of_stream(name, times, count))
        if prompts is not None
        else (lambda: of_uids(name, times, shared))
    )
    threads = [threading.Thread(target=work, daemon=True) for _ in range(PRODUCERS)]
    begin, sizes, first_rss = time.perf_counter(), list[int](), None
    for thread in threads:
        thread.start()
    with raysvc.attach(name, dp_size=1, look_ahead_steps=1) as client:
        for step in client.steps(stop=count // BATCH):
            client.commit(step.index)
            client.rollouts.set_weight_version(step.index + 1)
            client.rollouts.delete_before(step.index)
            if step.index % 50 == 49:
                sizes.append(
                    sum(each.stat().st_size for each in (folder / name).rglob("*") if each.is_file())
                )
                first_rss = first_rss or (step.index, rss_of(client))
        seconds, last = time.perf_counter() - begin, rss_of(client)
    for thread in threads:
        thread.join(5)
    stop_server(name)
    if prompts is not None:
        Rollouts._call = call  # type: ignore[method-assign]
    done = count // BATCH * BATCH
    grown = (last - first_rss[1]) / max(1, done - BATCH * (first_rss[0] + 1)) if first_rss else 0.0
    return {
        "prompts": "of the server" if prompts is not None else "of producers",
        "groups": done,
        "groups/s": round(done / seconds),
        "ask p50 ms": _ms(times["ask"], 50),
        "ask p99 ms": _ms(times["ask"], 99),
        "put p50 ms": _ms(times["put"], 50),
        "put p99 ms": _ms(times["put"], 99),
        "MB of disk at most": round(max(sizes, default=0) / 1e6, 2),
        "bytes of memory a group": round(grown),
    }


class _Locked:
    """One iterator of several threads."""

    def __init__(self, values: Iterator[str]) -> None:
        self._values, self._lock = values, threading.Lock()

    def __iter__(self) -> _Locked:
        return self

    def __next__(self) -> str:
        with self._lock:
            return next(self._values)


def rss_of(client: Any) -> int:
    """Bytes of the server's process."""
    import raysvc

    pid = raysvc.rollouts(client.lease.name)._call("stats", "control")["pid"]
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _ms(seconds: list[float], percentile: float) -> float:
    return round(1e3 * float(np.percentile(seconds or [0.0], percentile)), 2)


def main() -> None:
    """See the module."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        job = job_of(folder, count)
        quiet_ray()
        rows = [run(folder, "stream", count, job), run(folder, "uids", count, None)]
    show("Prompts", rows)


if __name__ == "__main__":
    main()
