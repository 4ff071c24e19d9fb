"""The `raysvc` command, and `python -m raysvc.cli`.

Always true:
- Ctrl-C is quiet from the first import on;
- the cycle collector looks seldom: imports make objects by the hundred thousand that stay;
- the end of the process visits no object of torch: the memory goes with the process.
"""

from __future__ import annotations

import atexit
import gc
import signal

from raysvc.cli.interrupt import leave

NEW_OBJECTS = 50_000  # before the collector looks; Python's 700 cost 0.07 of a second of imports


def main() -> None:
    """Entry point of the console script."""
    signal.signal(signal.SIGINT, leave)
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])
    atexit.register(gc.freeze)  # else the interpreter's last collections take 0.5 s after a run
    from raysvc.cli.main import app

    app()


if __name__ == "__main__":
    main()
