"""The `raysvc` command, and `python -m raysvc.cli`: Ctrl-C is quiet from the first import on."""

from __future__ import annotations

import signal

from raysvc.cli.interrupt import leave


def main() -> None:
    """Entry point of the console script."""
    signal.signal(signal.SIGINT, leave)
    from raysvc.cli.main import app

    app()


if __name__ == "__main__":
    main()
