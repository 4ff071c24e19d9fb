"""Whether a long life stays flat: every process of ours and of Ray's, files, disk and threads, over time.

    python benchmarks/soak.py [--steps 100000 --attaches 1000 --servers 200 --groups 50000]

Four things grow in a long life, one after another: steps are fetched two ahead, opened, committed and let go; trainers attach and detach;
servers start and stop; groups are put, trained and forgotten. Figures are taken ten times in each, of this process and all below it.

Figures (11-28, 2 cores, a load of 15 beside it):

- 100,000 steps: the server grows from 163.0 MB (at 10,000) to 166.9, by 0.2 in the last 10,000; the client by 3.4, the GCS by 1.0.
- 1,000 attaches: the server grows from 156.2 to 160.4 MB, in the last 200 by 0.2; threads and handles stay.
- 50,000 groups: the server grows from 234.7 MB (at 5,024) to 247.9. Python's own objects grow by 21 bytes a group: a digest of its name,
  which a later put is compared with. The rest is what the allocator does not give back. Names are 25 bytes a group on disk.
- 200 servers: from the 20th to the last the GCS grows from 50.1 to 55.5 MB, the client from 213.8 to 215.8, Ray's idle workers from 207.6 to
  221.4; the log monitor opens two files a server, 200 at most. When each server made its class anew, both grew by 0.15 MB a server, whatever Ray was told to cache of the dead.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import make_entry, quiet_ray, show

MEASURED = 10  # times in each part
GROUPS = 32  # of rollouts in a step
RAYS = {"gcs_server": "GCS", "raylet": "raylet", "dashboard": "dashboard"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, count in (("steps", 1000), ("attaches", 20), ("servers", 5), ("groups", 400)):
        parser.add_argument(f"--{name}", type=int, default=count)
    options = parser.parse_args()
    quiet_ray()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        uri = make_entry(path / "cache", 1600, 30)
        for name, part in (
            ("steps", steps),
            ("attaches", attaches),
            ("servers", servers),
            ("groups", groups),
        ):
            count = getattr(options, name)
            if count:
                rows = []
                for row in part(path / name, uri, count):
                    print(name, row, file=sys.stderr, flush=True)
                    rows.append(row)
                show(f"Soak: {count} {name}", [*rows, growth(rows)])


def steps(folder: Path, uri: str, count: int) -> Iterator[dict[str, Any]]:
    """One trainer's steps."""
    import ray

    from raysvc.actors.launch import stop_server
    from raysvc.client.batch_client import attach

    serve(folder, uri, "soak", count)
    with attach("soak", dp_size=2, look_ahead_steps=2) as client:
        for step in client.steps(stop=count):
            for mini in step.mini_batches:
                for shard in ray.get(list(mini.shards)):
                    assert shard[1]["input_ids"].sum() > 0
            client.commit(step.index)
            del step, mini, shard
            if due(client.next_step, count):
                yield figures(client.next_step, folder)
    stop_server("soak")


def attaches(folder: Path, uri: str, count: int) -> Iterator[dict[str, Any]]:
    """Trainers that come and go, each for one step."""
    from raysvc.actors.launch import stop_server
    from raysvc.client.batch_client import attach

    serve(folder, uri, "comings", count)
    for number in range(count):
        with attach("comings", dp_size=1) as client:
            for step in client.steps(stop=client.next_step + 1):
                client.commit(step.index)
        if due(number + 1, count):
            yield figures(number + 1, folder)
    stop_server("comings")


def servers(folder: Path, uri: str, count: int) -> Iterator[dict[str, Any]]:
    """Servers of one run folder, one after another."""
    from raysvc.actors.launch import stop_server

    for number in range(count):
        serve(folder, uri, "again", 100)
        stop_server("again")
        if due(number + 1, count):
            yield figures(number + 1, folder)


def groups(folder: Path, uri: str, count: int) -> Iterator[dict[str, Any]]:
    """Groups of rollouts, forgotten once they are trained."""
    import raysvc
    from raysvc.actors.launch import stop_server
    from raysvc.client.batch_client import attach

    raysvc.serve_rollouts(
        "rollouts",
        run_dir=str(folder),
        pad_token_id=0,
        plan={"batch_size": GROUPS},
        max_staleness=None,
        num_cpus=0,
    )
    producer = raysvc.rollouts("rollouts")
    count -= count % GROUPS
    with attach("rollouts", dp_size=1) as client:
        fill(producer, 0)
        for number, step in enumerate(client.steps(stop=count // GROUPS)):
            client.commit(step.index)
            del step
            fill(producer, number + 1)
            if (number + 1) % 10 == 0:
                client.rollouts.delete_before(number)
            if due(GROUPS * (number + 1), count, GROUPS):
                yield figures(GROUPS * (number + 1), folder)
    stop_server("rollouts")


def fill(producer: Any, step: int) -> None:
    """Put the groups of two steps at the beginning, and of one more after each step."""
    import raysvc

    numbers = range(0 if step == 0 else GROUPS * (step + 1), GROUPS * (step + 2))
    rows = {number: [[number % 999 + 1, *range(1, 60)]] * 4 for number in numbers}
    producer.put_groups([raysvc.Group(f"g{n}", rows[n], [[0] + [1] * 59] * 4) for n in numbers])


def serve(folder: Path, uri: str, name: str, num_steps: int) -> Any:
    from raysvc.actors.launch import start_server
    from raysvc.actors.server.spec import ServeSpec
    from raysvc.job.config import PlanConfig

    plan = PlanConfig(batch_size=16, epochs=-(-num_steps // 100))
    spec = ServeSpec(
        name=name, sources=[uri], plan=plan, pad_token_id=0, journal=str(folder / "journal"), num_cpus=0
    )
    return start_server(spec, detached=True)


def due(done: int, count: int, by: int = 1) -> bool:
    """Ten times in all; `by`: how many more are done each time."""
    return done * MEASURED // count > (done - by) * MEASURED // count


def growth(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The last figures less those after the third tenth."""
    first = rows[min(2, len(rows) - 1)]
    return {
        **{name: round(rows[-1].get(name, 0) - value, 1) for name, value in first.items()},
        "done": "growth",
    }


def figures(done: int, folder: Path) -> dict[str, Any]:
    """Memory in MB by kind of process, and counts; of this process and all below it."""
    gc.collect()
    memory: dict[str, float] = {}
    threads = handles = 0
    for pid in family(os.getpid()):
        try:
            kind = kind_of(pid)
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            memory[kind] = memory.get(kind, 0.0) + int(status["VmRSS"].split()[0]) / 1024
            threads += int(status["Threads"])
            handles += len(os.listdir(f"/proc/{pid}/fd"))
        except (OSError, KeyError):  # it has ended
            continue
    found = [path for path in folder.rglob("*") if path.is_file()]
    row: dict[str, Any] = {
        "done": done,
        **{f"{kind} MB": round(mb, 1) for kind, mb in sorted(memory.items())},
    }
    disk = sum(path.stat().st_size for path in found) / 2**20
    return {
        **row,
        "threads": threads,
        "handles": handles,
        "files": len(found),
        "disk MB": round(disk, 2),
        "s": round(time.perf_counter() - BEGIN),
    }


def kind_of(pid: int) -> str:
    """What a process is: ours by the class of its actor, Ray's by its program."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    title = words[0].decode(errors="replace")
    if pid == os.getpid():
        return "client"
    if title.startswith("ray::"):
        return "server" if "Server" in title else "idle worker"
    for part, name in RAYS.items():
        if any(part in word.decode(errors="replace") for word in words[:3]):
            return name
    return "other"


def family(root: int) -> list[int]:
    """A process and all below it."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry))
    found, todo = [], [root]
    while todo:
        found.append(todo.pop())
        todo += parents.get(found[-1], ())
    return found


BEGIN = time.perf_counter()
if __name__ == "__main__":
    main()
