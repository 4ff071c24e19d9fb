"""Plays one contestant in a process of its own, which may die in the middle: `python play.py ADAPTER SPEC.json`.

An adapter is a module beside this one with
- `VERSION`, `PROMISE` (what its documentation says of resuming) and `SETTINGS` (how it is used here);
- `open_loader(rows, rank=, world_size=, batch_size=, epochs=, seed=, workers=, shuffle=)`, which returns an object with
  `batches()`, an iterator over lists of row numbers; `save()`, a state after the batch that was given out last; and `load(state)`.
Each line of the log is one batch, on disk before the next one is asked for.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any


def main(adapter: str, spec_path: str) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    spec = json.loads(Path(spec_path).read_text())
    log = open(spec["log"], "a", buffering=1)  # noqa: SIM115 - until the process ends, or dies
    begin = time.monotonic()
    try:
        _play(importlib.import_module(adapter), spec, log, begin)
    except Exception as error:  # noqa: BLE001 - what a contestant says is what is looked at
        # of an error that a worker raised, the last line says what it was
        said = (str(error).strip().splitlines() or [""])[-1]
        print(json.dumps({"error": f"{type(error).__name__}: {said[:300]}"}), file=log)
    os._exit(0)  # threads and children of a contestant keep nobody


def _play(module: Any, spec: dict[str, Any], log: Any, begin: float) -> None:
    loader = module.open_loader(Path(spec["rows"]), **spec["options"])
    loader.save_at = spec.get("save_after")  # for those that save by themselves
    if spec.get("load"):
        # written by the same contestant a moment ago, in a folder of this run
        loader.load(pickle.loads(Path(spec["load"]).read_bytes()))
    for count, batch in enumerate(loader.batches(), 1):
        first_s = {"first_s": round(time.monotonic() - begin, 2)} if count == 1 else {}
        print(json.dumps({"rows": [int(row) for row in batch], **first_s}), file=log)
        if count == spec.get("save_after"):
            Path(spec["save"]).write_bytes(pickle.dumps(loader.save()))
        if count == spec.get("die_after"):
            os.kill(os.getpid(), signal.SIGKILL)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"end": True, "peak_mb": round(peak_mb)}), file=log)


if __name__ == "__main__":
    main(*sys.argv[1:])
