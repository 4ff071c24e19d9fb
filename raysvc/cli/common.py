"""What every command shares: options, the edge where errors become exit codes, the last line of JSON.

Always true:
- exit code 0 only on success, 2 for a user's mistake (one line on stderr, no traceback), 1 for what raysvc
  raised otherwise, 130 for Ctrl-C;
- with `--json` the last line of stdout is one JSON object, everything else goes to stderr.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ParamSpec, TypeVar

import typer

from raysvc.errors import RaysvcError, UserMistake

P = ParamSpec("P")
R = TypeVar("R")

Job = Annotated[str, typer.Option("-c", "--config", help="Path of a job.yaml.", metavar="JOB.YAML")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Dotted overrides, like plan.batch_size=64.", metavar="[KEY=VALUE]..."),
]
Address = Annotated[
    str | None, typer.Option(help="Ray cluster; default RAY_ADDRESS, else a local Ray.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Show log lines.")]


def edge(function: Callable[P, R]) -> Callable[P, R]:
    """Turn errors into a line and an exit code."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        logging.basicConfig(
            level=logging.INFO if kwargs.get("verbose") else logging.WARNING,
            format="%(levelname)s %(name)s %(message)s",
            stream=sys.stderr,
        )
        try:
            return function(*args, **kwargs)
        except UserMistake as error:
            raise _fail(error, 2) from None
        except (RaysvcError, TimeoutError) as error:
            raise _fail(error, 1) from None
        except KeyboardInterrupt:
            print("interrupted: the same command goes on from what is finished", file=sys.stderr)
            raise typer.Exit(130) from None

    return run


def emit(result: Mapping[str, Any]) -> None:
    """Print the machine-readable result."""
    print(json.dumps(result), flush=True)


def _fail(error: Exception, code: int) -> typer.Exit:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return typer.Exit(code)
