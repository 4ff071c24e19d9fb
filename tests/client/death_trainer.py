"""A trainer that can be told where to die: `python death_trainer.py ADDRESS SERVER CHECKPOINT [POINT:STEP [SIGNAL]]`.

With SIGSTOP it falls asleep there, until somebody wakes it.

Its weights are the list of the rows that it applied; they are saved every second step.
Points: `fetching` (the step was asked for, and did not come yet), `fetched` (before it is applied), `stepped` (applied,
not saved), `saved` (saved, not committed).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import raysvc
from raysvc.errors import LeaseHeld


def main(address: str, server: str, checkpoint: str, death: str = "none:-1", how: str = "SIGKILL") -> None:
    point, step = death.split(":")

    def here(name: str, index: int) -> None:
        if (name, index) == (point, int(step)):
            os.kill(os.getpid(), signal.Signals[how])

    with attach_when_free(address, server) as client:
        path = Path(checkpoint)
        saved = json.loads(path.read_text()) if path.exists() else {"applied": [], "data": None}
        applied = saved["applied"]
        if saved["data"] is not None:
            client.load_state_dict(saved["data"])
        else:
            client.rewind(0)
        for fetched in client.steps(on_fetch=lambda fetched: here("fetching", fetched.index)):
            here("fetched", fetched.index)
            applied += [[fetched.index, mini.info.row_ids.tolist()] for mini in fetched.mini_batches]
            here("stepped", fetched.index)
            if fetched.index % 2 == 1 or fetched.index + 1 == client.schedule.num_steps:
                save(path, applied, {**client.state_dict(), "frontier": fetched.index + 1})
                here("saved", fetched.index)
            client.commit(fetched.index)


def save(path: Path, applied: Any, data: Any) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps({"applied": applied, "data": data}))
    draft.rename(path)


def attach_when_free(address: str, server: str) -> Any:
    while True:
        try:
            return raysvc.attach(server, look_ahead_steps=2, address=address)
        except LeaseHeld:
            time.sleep(0.1)


if __name__ == "__main__":
    main(*sys.argv[1:])
