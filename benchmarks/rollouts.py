"""How fast producers put rollouts, and whether anybody waits for a slow store.

    python benchmarks/rollouts.py [--quick]

Four producers, each an actor of its own, against one rollout server on local disk; every put is synced before it is
acknowledged. `floor` is what the same store takes for one file of that size, alone; `Ray` is what the same
producers reach with the same arguments and an actor that does nothing, as fast as it answers. CPU is what the processes used, whoever else was there.
- small: groups of two sequences of 64 tokens, so many a put, so many puts of a producer under way;
- payload: puts of several MB;
- slow store: every write takes 3 s; control calls and commits while puts wait for it, and before that (idle).

Figures: small groups are put durably at 11,060/s (aim 5,000; 11-21). An acknowledgment takes 24 ms (p99, four in flight; aim 20), of which
Ray's call is 10. Control calls stay at 3.0 to 4.3 ms while the store takes 3 s for a write.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from common import quiet_ray, show

PRODUCERS = 4
PLAN = {"batch_size": 64, "columns": ("input_ids", "labels", "logprobs", "reward")}
SLOW_S = 3.0


def groups_of(prefix: str, count: int, sequences: int, tokens: int) -> list[Any]:
    """Groups with logprobs and a reward."""
    from raysvc.rl.group import Group

    ids = np.arange(tokens, dtype=np.int32)
    mask, logprobs = np.ones(tokens, np.uint8), np.full(tokens, -0.5, np.float32)
    return [
        Group(
            f"{prefix}-{number}",
            [ids] * sequences,
            [mask] * sequences,
            {"logprobs": [logprobs] * sequences},
            {"reward": np.zeros(sequences, np.float32)},
        )
        for number in range(count)
    ]


class Setting(NamedTuple):
    """What a producer does.

    Attributes:
        per_put: groups.
        threads: puts under way.
        size: sequences of a group, tokens of a sequence.
        puts_per_s: of one producer; None: as fast as it is answered.
    """

    per_put: int
    threads: int
    size: tuple[int, int]
    puts_per_s: float | None = None


class Producer:
    """Puts as fast as it is answered, from several threads."""

    def ready(self) -> bool:
        """Whether it is there."""
        return True

    def produce(self, name: str, seconds: float, setting: Setting) -> tuple[list[float], float]:
        """Seconds of each put, and CPU seconds of all."""
        import raysvc

        producer, took = raysvc.rollouts(name), list[float]()
        begun = time.perf_counter()

        def put() -> None:
            own = 0
            while (now := time.perf_counter()) < begun + seconds:
                if setting.puts_per_s is not None and (early_s := begun + own / setting.puts_per_s - now) > 0:
                    time.sleep(early_s)
                own += 1
                groups = groups_of(uuid.uuid4().hex, setting.per_put, *setting.size)
                begin, cpu = time.perf_counter(), time.thread_time()
                producer.put_groups(groups)
                took.append(time.perf_counter() - begin)
                used.append(time.thread_time() - cpu)

        used = list[float]()
        at_once(put, setting.threads)
        return took, sum(used)

    def call(self, actor: Any, seconds: float, setting: Setting) -> list[float]:
        """Seconds of each answer of an actor that does nothing."""
        import ray

        from raysvc.rl.group_table import table_of

        table, until, took = table_of(groups_of("x", setting.per_put, *setting.size)), 0.0, list[float]()
        value = ray.put(table) if table.nbytes > 100_000 else table
        ray.get(actor.take.remote(value))
        until = time.perf_counter() + seconds

        def call() -> None:
            while (begin := time.perf_counter()) < until:
                ray.get(actor.take.remote(value))
                took.append(time.perf_counter() - begin)

        at_once(call, setting.threads)
        return took


class Nothing:
    """Answers."""

    def take(self, value: Any) -> None:
        """Nothing happens."""


def at_once(call: Callable[[], None], threads: int) -> None:
    """Run it in several threads."""
    each = [threading.Thread(target=call) for _ in range(threads)]
    for thread in each:
        thread.start()
    for thread in each:
        thread.join()


def cpu_s(pid: int) -> float:
    """CPU seconds of a process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def floor_ms(folder: Path, nbytes: int, repeats: int) -> list[float]:
    """Milliseconds of one synced file of that size, each time."""
    from raysvc.cache.store.open import open_store

    store, data, took = open_store(str(folder / "floor")), os.urandom(nbytes), []
    for _ in range(repeats):
        begin = time.perf_counter()
        store.write(f"groups/{uuid.uuid4().hex}", data)
        took.append(1e3 * (time.perf_counter() - begin))
    return sorted(took)


def put_row(folder: Path, producers: list[Any], seconds: float, setting: Setting) -> dict[str, Any]:
    """One line of the table."""
    import ray

    import raysvc
    from raysvc.actors.launch import PUT_THREADS, stop_server
    from raysvc.rl.group_table import table_of

    name, per_put = f"bench-{uuid.uuid4().hex[:6]}", setting.per_put
    server = raysvc.serve_rollouts(
        name, run_dir=str(folder / name), pad_token_id=0, plan=PLAN, max_staleness=None, num_cpus=0
    )
    ray.get([each.produce.remote(name, 0.5, setting) for each in producers])
    pid = ray.get(server.actor.stats.remote())["pid"]
    begin, cpu = time.perf_counter(), cpu_s(pid)
    made = ray.get([each.produce.remote(name, seconds, setting) for each in producers])
    wall_s, server_s = time.perf_counter() - begin, cpu_s(pid) - cpu
    acks = sorted(took for one, _ in made for took in one)
    files = len(list((folder / name / "server" / "rollouts" / "groups").iterdir()))
    stop_server(name)
    nothing = ray.remote(Nothing).options(num_cpus=0, max_concurrency=PUT_THREADS).remote()
    alone = ray.get([each.call.remote(nothing, 1.0, setting) for each in producers])
    answers = sorted(took for one in alone for took in one)
    ray.kill(nothing)
    nbytes = table_of(groups_of("size", per_put, *setting.size)).nbytes
    floor = floor_ms(folder, nbytes, 8 if nbytes > 10**6 else 50)
    return {
        "groups a put": per_put,
        "puts under way": PRODUCERS * setting.threads,
        "offered groups/s": PRODUCERS * setting.puts_per_s * per_put if setting.puts_per_s else "all",
        "kB a put": round(nbytes / 1e3, 1),
        "groups/s": round(len(acks) * per_put / wall_s),
        "MB/s": len(acks) * nbytes / 1e6 / wall_s,
        "ack p50 ms": 1e3 * acks[len(acks) // 2],
        "ack p99 ms": 1e3 * acks[int(0.99 * len(acks))],
        "puts a file": round(len(acks) / max(1, files), 1),
        "server CPU ms a put": 1e3 * server_s / len(acks),
        "producer CPU ms a put": 1e3 * sum(used for _, used in made) / len(acks),
        "Ray calls/s": len(answers),
        "Ray p99 ms": 1e3 * answers[int(0.99 * len(answers))],
        "floor p50 ms": floor[len(floor) // 2],
        "floor max ms": floor[-1],
        "floor MB/s": nbytes / 1e3 / floor[len(floor) // 2],
    }


def slow_store_rows(folder: Path, seconds: float) -> list[dict[str, Any]]:
    """Latency of calls while puts wait for a store that takes 3 s a write."""
    import ray

    from raysvc.actors.rollouts.rollout_server import RolloutServer
    from raysvc.actors.server.spec import RolloutSpec, ServeSpec
    from raysvc.client.batch_client import attach
    from raysvc.client.rl.rollouts import rollouts
    from raysvc.job.config import PlanConfig
    from raysvc.team import ray_namespace

    class SlowServer(RolloutServer):
        """A rollout server on a slow disk."""

        def slow_down(self) -> None:
            """From now on every write takes 3 s."""
            from raysvc.cache.store.posix import PosixStore

            publish = PosixStore._publish
            PosixStore._publish = lambda *args: (time.sleep(SLOW_S), publish(*args))[1]  # type: ignore[method-assign]

    spec = ServeSpec(
        name="slow",
        sources=(),
        plan=PlanConfig(**PLAN),
        pad_token_id=0,
        journal=str(folder / "slow"),
        rollouts=RolloutSpec(max_staleness=None),
        num_cpus=0,
    )
    threads = {"fetch": 16, "lease": 16, "put": 8, "control": 3}
    actor = ray.remote(concurrency_groups=threads)(SlowServer)
    server = actor.options(name="slow", namespace=ray_namespace(), num_cpus=0).remote(
        spec.model_dump_json(), "one"
    )
    producer = rollouts("slow")
    producer.put_groups(groups_of("a", 512, 2, 64))
    with attach("slow", look_ahead_steps=0) as client:
        steps = client.steps()
        for step in (next(steps), next(steps), next(steps)):
            last = step.index
        fence, control = client.lease.fence, {"concurrency_group": "control"}
        calls: dict[str, Callable[[], Any]] = {
            "producer.stats()": producer.stats,
            "heartbeat": lambda: ray.get(server.heartbeat.options(**control).remote(fence)),
            "commit": lambda: ray.get(server.commit.options(concurrency_group="lease").remote(fence, last)),
        }
        idle = {name: latency(call, seconds) for name, call in calls.items()}
        ray.get(server.slow_down.remote())
        stop = threading.Event()
        puts = [threading.Thread(target=putting, args=(producer, stop)) for _ in range(4)]
        for thread in puts:
            thread.start()
        time.sleep(0.5)
        slow = {name: latency(call, seconds) for name, call in calls.items()}
        stop.set()
        for thread in puts:
            thread.join()
    ray.kill(server)
    return [
        {"call": name, **slow[name], **{f"idle {key}": value for key, value in idle[name].items()}}
        for name in calls
    ]


def putting(producer: Any, stop: threading.Event) -> None:
    """Put after put."""
    while not stop.is_set():
        producer.put_groups(groups_of(uuid.uuid4().hex, 1, 2, 64))


def latency(call: Callable[[], Any], seconds: float) -> dict[str, Any]:
    """Percentiles of one call after the other."""
    took, until = [], time.perf_counter() + seconds
    while time.perf_counter() < until:
        begin = time.perf_counter()
        call()
        took.append(1e3 * (time.perf_counter() - begin))
    took.sort()
    return {"calls": len(took), "p50 ms": took[len(took) // 2], "p99 ms": took[int(0.99 * len(took))]}


def main() -> None:
    """All tables."""
    import ray

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    seconds = 3.0 if parser.parse_args().quick else 10.0
    quiet_ray(num_cpus=PRODUCERS, object_store_mb=1500)
    small, large = (2, 64), (8, 65536)  # sequences of a group, tokens of a sequence
    settings = [
        Setting(1, 1, small), Setting(1, 8, small), Setting(64, 1, small, 20.0), Setting(64, 2, small),
        Setting(4, 1, large), Setting(16, 1, large),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as name:
        folder = Path(name)
        producers = [ray.remote(Producer).options(num_cpus=0).remote() for _ in range(PRODUCERS)]
        ray.get([each.ready.remote() for each in producers])
        show("Puts of four producers", [put_row(folder, producers, seconds, each) for each in settings])
        show("While a store takes 3 s a write", slow_store_rows(folder, 2 * seconds))
    ray.shutdown()


if __name__ == "__main__":
    main()
