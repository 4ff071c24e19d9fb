"""What a rank costs the server and itself, from 8 ranks to 1,024, and the controller mode beside it.

    python benchmarks/many_ranks.py [--ranks 8 64 256 1024] [--peers 1 8] [--seconds 15]

Stand-in ranks are threads of this process: each attaches by itself, two steps ahead, opens its shard of every step, waits for
the others as a gradient sync would, and commits. With `--peers` each data-parallel rank is so many processes of a mesh
(tensor-parallel ones), each a thread with a client of its own. A step has two rows a rank, of GSM8K's lengths. In controller mode one client fetches
for all ranks, and opens every shard here. Processor time is of whole processes, all their threads, from the third step on, by client and step;
`clients` is this process, in which a rank's own part is. `server MB` is what the server holds at the end.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import make_entry, quiet_ray, show

ROWS, MEAN_TOKENS = 2, 150  # of a rank and step; of a row
WARM_STEPS = 2
NAME = "many"
SWITCH_S = 0.1  # a thread that waits for the interpreter asks for it so often; a thousand that ask every 5 ms do nothing else


class Laps:
    """Called once a step by the last rank: notes times, and says when to end."""

    def __init__(self, pids: dict[str, int], seconds: float) -> None:
        self._pids, self._seconds = pids, seconds
        self.step, self.done = 0, False
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}

    def __call__(self) -> None:
        self.step += 1
        if self.step == WARM_STEPS:
            self._first = self._now()
        elif self.step > WARM_STEPS:
            self._last = self._now()
            self.done = self._last["wall"] - self._first["wall"] > self._seconds

    def figures(self, clients: int) -> dict[str, Any]:
        """Since the warm steps, in milliseconds by client and step."""
        steps = self.step - WARM_STEPS
        passed = {name: (self._last[name] - value) / steps for name, value in self._first.items()}
        each = {f"{name} ms": round(1e3 * passed[name] / clients, 3) for name in self._pids}
        return {"clients": clients, **each, "steps/s": round(1 / passed["wall"], 2), "steps": steps}

    def _now(self) -> dict[str, float]:
        return {"wall": time.perf_counter(), **{name: cpu_s(pid) for name, pid in self._pids.items()}}


def rank_mode(ranks: int, laps: Laps, peers: int = 1) -> None:
    """Every process of a mesh by itself."""
    import raysvc

    mesh = raysvc.Mesh(dp=ranks, tp=peers)
    clients: dict[int, Any] = {}
    seats = iter(range(mesh.size))

    def attach() -> None:
        for seat in seats:
            coords = {"dp": seat // peers, "tp": seat % peers}
            clients[seat] = raysvc.attach_rank(NAME, mesh=mesh, coords=coords, group="g")

    together([attach] * 8)
    barrier = threading.Barrier(mesh.size, action=laps)

    def train(client: Any) -> None:
        for step in client.steps():
            assert step.shards[0].arrays["input_ids"].shape[0] == ROWS
            barrier.wait()
            client.commit(step.index)
            if laps.done:
                return

    together([lambda client=client: train(client) for client in clients.values()])
    together([client.detach for client in clients.values()])


def controller_mode(ranks: int, laps: Laps) -> None:
    """One driver for all."""
    import ray

    import raysvc

    with raysvc.attach(NAME, dp_size=ranks) as client:
        for step in client.steps():
            for shard in ray.get(list(step.mini_batches[0].shards)):
                assert raysvc.read_shard(shard).arrays["input_ids"].shape[0] == ROWS
            laps()
            client.commit(step.index)
            if laps.done:
                return


def together(work: list[Callable[[], None]]) -> None:
    """Run all in threads of their own; the first error is raised."""
    errors: list[BaseException] = []

    def safe(one: Callable[[], None]) -> None:
        try:
            one()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=safe, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def cpu_s(pid: int) -> float:
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def held_mb(pid: int) -> int:
    """Memory that a process holds by itself."""
    line = next(
        one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith("RssAnon")
    )
    return int(line.split()[1]) >> 10


def raylet_pid() -> int:
    """Of the raylet that this process started."""
    for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        if words[0].endswith(b"/raylet") and parent == os.getpid():
            return pid
    raise RuntimeError("no raylet of this process")


def measured(folder: Path, ranks: int, peers: int, options: Any) -> dict[str, Any]:
    """A server of its own for a number of ranks.

    Args:
        peers: of each rank; 0: controller mode.
    """
    import ray

    from raysvc.actors.launch import start_server, stop_server
    from raysvc.actors.server.spec import ServeSpec
    from raysvc.job.config import PlanConfig

    uri = make_entry(folder / "cache", 40 * ROWS * max(ranks, 64), MEAN_TOKENS)
    plan = PlanConfig(batch_size=ROWS * ranks, micro_batch_size=ROWS, epochs=1000)
    spec = ServeSpec(
        name=NAME, sources=[uri], plan=plan, pad_token_id=0, journal=str(folder / "journal"), num_cpus=0
    )
    pid = ray.get(start_server(spec, detached=True).stats.remote())["pid"]
    laps = Laps({"server": pid, "clients": os.getpid(), "raylet": raylet_pid()}, options.seconds)
    if peers:
        rank_mode(ranks, laps, peers)
    else:
        controller_mode(ranks, laps)
    held = held_mb(pid)
    stop_server(NAME)
    mode = f"{peers} a rank" if peers else "controller"
    return {"mode": mode, "ranks": ranks, **laps.figures(ranks * max(peers, 1)), "server MB": held}


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--peers", type=int, nargs="+", default=[1], help="processes of a rank")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--no-controller", action="store_true")
    options = parser.parse_args()
    modes = options.peers if options.no_controller else [*options.peers, 0]
    sys.setswitchinterval(SWITCH_S)
    quiet_ray()
    table = []
    for ranks in options.ranks:
        for peers in modes:
            with tempfile.TemporaryDirectory() as folder:
                table.append(measured(Path(folder), ranks, peers, options))
            print(table[-1], file=sys.stderr, flush=True)
    show("Ranks of one server", table)


if __name__ == "__main__":
    main()
