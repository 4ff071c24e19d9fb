"""Plays one contestant, each time in a process of its own, which may die in the middle: `python play.py ADAPTER < PATHS`.

An adapter is a module beside this one with
- `VERSION`, `PROMISE` (what its documentation says of resuming) and `SETTINGS` (how it is used here);
- `NOT_OFFERED`, where it has one: name of a case -> what its documentation says instead;
- `OFFERS`, where it has one: names of cases that few loaders offer, see `Case.unless`;
- `IMPORTS`, where it has one: what the parent imports once, so that a process begins in milliseconds;
- `prepare()`, where it has one: what lives as long as the parent;
- `open_loader(rows, run=, rank=, world_size=, batch_size=, epochs=, seed=, workers=, shuffle=)`, which returns an object with
  `batches()`, an iterator over lists of row numbers (with the option `ids=True`: of the ids of rows); `save()`, a state after the batch that was given out last; and `load(state)`.
  With the option `rollouts=True` it samples answers to prompts itself, and `sampled` lists the rows that it did so far.
Each line read is the path of a spec, for which a child is forked; `PATH` is printed when it has ended. Each line of the child's log
is one batch, on disk before the next one is asked for.
"""

from __future__ import annotations

import builtins
import importlib
import json
import os
import pickle
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


def main(adapter: str) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    module = importlib.import_module(adapter)
    for name in getattr(module, "IMPORTS", ()):
        importlib.import_module(name)
    getattr(module, "prepare", lambda: None)()
    print("ready", flush=True)
    children: dict[int, str] = {}
    watched: dict[int, Memory] = {}
    paths = os.fdopen(0, "rb", buffering=0)
    while True:
        if select.select([paths], [], [], 0.02)[0]:
            line = paths.readline().decode().strip()
            if not line:
                break
            pid = os.fork()
            if pid == 0:
                os.setsid()  # with its workers, a group of its own
                _child(module, line)
            children[pid] = line
            if limit_mb := json.loads(Path(line).read_text())["memory_mb"]:
                watched[pid] = Memory(limit_mb)
        for pid in list(children):
            if pid in watched:
                watched[pid].look(pid)
            if os.waitpid(pid, os.WNOHANG)[0]:
                if pid in watched:
                    watched.pop(pid).tell(Path(json.loads(Path(children[pid]).read_text())["log"]))
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)  # workers of one that was killed
                print(children.pop(pid), flush=True)


class Memory:
    """Watches what all processes below this one hold of their own and share, five times a second; kills at a limit.

    Pages of files that are mapped are not counted: the system takes them back.
    """

    def __init__(self, limit_mb: int) -> None:
        self.limit_mb, self.most_mb, self.next_s = limit_mb, 0, 0.0

    def look(self, pid: int) -> None:
        if time.monotonic() < self.next_s:
            return
        self.most_mb = max(self.most_mb, sum(map(_own_kb, _below(os.getpid()))) // 1024)
        if self.most_mb > self.limit_mb:
            os.killpg(pid, signal.SIGKILL)
        self.next_s = time.monotonic() + 0.2

    def tell(self, log: Path) -> None:
        said: dict[str, Any] = {"total_mb": self.most_mb}
        if self.most_mb > self.limit_mb:
            said["error"] = "killed: it needed more memory than the limit"
        with log.open("a") as more:
            print(json.dumps(said), file=more)


def _below(pid: int) -> list[int]:
    """A process and all that it began, and so on."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def _own_kb(pid: int) -> int:
    """Memory of a process, where several share it its part of that."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon", "Pss_Shmem")))
    return 0


def _child(module: Any, spec_path: str) -> None:
    spec = json.loads(Path(spec_path).read_text())
    errors = os.open(spec["errors"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(errors, number)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(spec["port"]))
    with open(spec["log"], "a", buffering=1) as log:
        print(json.dumps({"pid": os.getpid()}), file=log)
        try:
            _play(module, spec, log, time.monotonic())
        except BaseException as error:  # noqa: BLE001 - what a contestant says is what is looked at
            # of an error that a worker raised, the last line says what it was
            said = (str(error).strip().splitlines() or [""])[-1]
            print(json.dumps({"error": f"{type(error).__name__}: {said[:300]}"}), file=log)
    os._exit(0)  # threads and children of a contestant keep nobody


class Imports:
    """Counts the seconds of imports, which each contestant does at another time; they are told apart from its own."""

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0
        builtins.__import__ = self._timed(builtins.__import__)
        importlib.import_module = self._timed(importlib.import_module)

    def _timed(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **more: Any) -> Any:
            if self._depth or threading.current_thread() is not threading.main_thread():
                return load(*args, **more)
            self._depth, begin = 1, time.monotonic()
            try:
                return load(*args, **more)
            finally:
                self._depth = 0
                self.seconds += time.monotonic() - begin

        return timed


def _play(module: Any, spec: dict[str, Any], log: Any, begin: float) -> None:
    imports = Imports()
    loader = module.open_loader(Path(spec["rows"]), **spec["options"])
    loader.save_at = spec.get("save_after")  # for those that save by themselves
    if spec.get("load"):
        # written by the same contestant a moment ago, in a folder of this run
        loader.load(pickle.loads(Path(spec["load"]).read_bytes()))
    done = 0  # answers to prompts that are told
    for count, batch in enumerate(loader.batches(), 1):
        own_s = time.monotonic() - begin - imports.seconds
        first_s = {"first_s": round(own_s, 2), "import_s": round(imports.seconds, 2)} if count == 1 else {}
        rows = (
            {"ids": [[*map(int, row)] for row in batch]}
            if spec["options"].get("ids")
            else {"rows": [*map(int, batch)]}
        )
        known = [*getattr(loader, "sampled", ())]  # producers may add to it meanwhile
        sampled, done = {"sampled": known[done:]} if known else {}, len(known)
        print(json.dumps({**rows, **sampled, **first_s}), file=log)
        if count == spec.get("save_after"):
            state = pickle.dumps(loader.save())
            Path(spec["save"]).write_bytes(state)
        if count == spec.get("die_after"):
            os.kill(os.getpid(), signal.SIGKILL)
        if count == spec["options"].get("limit"):
            break
    print(json.dumps({"end": True, "peak_mb": _peak_mb()}), file=log)


def _peak_mb() -> int:
    """Returns what this process held at most since it was forked, with what it shares with its parent."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    )
    return int(line.split()[1]) // 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
