"""What every command shares: options, the edge where errors become exit codes, the last line of JSON.

Always true:
- exit code 0 only on success, 2 for a user's mistake (one line on stderr, no traceback), 1 for what raysvc
  raised otherwise, 130 for Ctrl-C;
- with `--json` the last line of stdout is one JSON object, everything else goes to stderr;
- every command takes -v and -q, before its name or after it.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ParamSpec, TypeVar

import typer

from raysvc.cli import interrupt
from raysvc.cli.view import show_progress
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
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Show results and errors alone.")]
LOUDNESS = {"verbose": Verbose, "quiet": Quiet}

_before_the_command = {"verbose": False, "quiet": False}  # what stood there


def before_the_command(verbose: Verbose = False, quiet: Quiet = False) -> None:
    """Ray-native distributed data service for LLM post-training."""
    _before_the_command.update(verbose=verbose, quiet=quiet)


def edge(function: Callable[P, R]) -> Callable[..., R]:
    """A command: with -v and -q, its errors a line and an exit code, Ctrl-C once to end and twice to leave."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> R:
        chosen = {name: kwargs.pop(name, False) or _before_the_command[name] for name in LOUDNESS}
        _set_loudness(**chosen)
        try:
            with interrupt.twice():
                return function(*args, **kwargs)
        except UserMistake as error:
            raise _fail(error, 2) from None
        except (RaysvcError, TimeoutError) as error:
            raise _fail(error, 1) from None
        except KeyboardInterrupt as error:
            said = str(error) or "the same command goes on from what is finished"
            print(f"interrupted: {said}", file=sys.stderr)
            raise typer.Exit(130) from None

    signature = inspect.signature(function, eval_str=True)
    extra = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
        for name, kind in LOUDNESS.items()
    ]
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *extra])  # type: ignore[attr-defined]
    run.__annotations__ = {**function.__annotations__, **LOUDNESS}
    return run


def emit(result: Mapping[str, Any]) -> None:
    """Print the machine-readable result."""
    print(json.dumps(result), flush=True)


def _set_loudness(*, verbose: bool, quiet: bool) -> None:
    logging.basicConfig(format="%(levelname)s %(name)s %(message)s", stream=sys.stderr)
    level = logging.INFO if verbose else logging.ERROR if quiet else logging.WARNING
    logging.getLogger().setLevel(level)
    show_progress(not quiet)


def _fail(error: Exception, code: int) -> typer.Exit:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return typer.Exit(code)
