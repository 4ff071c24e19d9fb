"""Defines what every command shares: options, the edge where errors become exit codes, the last line of JSON.

Always true:
- exit code 0 only on success, 2 for a user's mistake (one line on stderr, no traceback), 1 for what raysvc
  raised otherwise, 130 for Ctrl-C and 143 for SIGTERM;
- what a file system refuses is a user's mistake;
- a job.yaml, or a run in place of its job, may stand where overrides stand; see `raysvc.cli.named_run`;
- with `--json` the last line of stdout is one JSON object, everything else goes to stderr;
- every command takes -v and -q, before its name or after it;
- a local Ray that a command started ends with it.
"""

from __future__ import annotations

import errno
import functools
import inspect
import json
import logging
import shlex
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ParamSpec, TypeVar

import typer

from raysvc.cli import interrupt
from raysvc.cli.named_run import SERVED_RUNS, with_job_named
from raysvc.cli.view import show_progress
from raysvc.errors import ConfigError, RaysvcError, UserMistake

P = ParamSpec("P")
R = TypeVar("R")

Job = Annotated[str, typer.Option("-c", "--config", help="The job file.", metavar="JOB.YAML")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="A job file (instead of -c) or the folder of a run, and dotted overrides such as plan.batch_size=64.",
        metavar="[JOB.YAML|RUN] [KEY=VALUE]...",
    ),
]
Address = Annotated[
    str | None,
    typer.Option(help="Ray cluster to use. Default: RAY_ADDRESS, else a local Ray.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="End stdout with one line of JSON.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Show log lines.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print results and errors only.")]
FILE_SYSTEM = {  # errors that a user can fix -> how
    errno.EACCES: "allow this user to use it, or name another place",
    errno.EPERM: "allow this user to use it, or name another place",
    errno.EROFS: "name a place that can be written",
    errno.ENOSPC: "make room on its disk, or name another one",
    errno.EDQUOT: "make room in your quota, or name another disk",
    errno.ENOENT: "name a place that exists",
    errno.ENOTDIR: "name a path that leads through folders",
    errno.EISDIR: "name a file, this is a folder",
    errno.EEXIST: "name a folder, this is a file",
    errno.ENAMETOOLONG: "give a shorter name",
}
LOUDNESS = {"verbose": Verbose, "quiet": Quiet}


Version = Annotated[
    bool,
    typer.Option(
        "--version", help="Print the version.", is_eager=True, callback=lambda asked: _say_version(asked)
    ),
]
_before_the_command = {"verbose": False, "quiet": False}  # what stood there


def before_the_command(verbose: Verbose = False, quiet: Quiet = False, version: Version = False) -> None:
    """Ray-native distributed data service for LLM post-training."""
    _before_the_command.update(verbose=verbose, quiet=quiet)


def edge(function: Callable[P, R]) -> Callable[..., R]:
    """A command: with -v and -q, its errors a line and an exit code, Ctrl-C once to end and twice to leave."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> R:
        chosen = {name: kwargs.pop(name, False) or _before_the_command[name] for name in LOUDNESS}
        _set_loudness(**chosen)
        with interrupt.twice():  # also while Ray ends
            try:
                return function(*args, **with_job_named(kwargs, default, function.__name__ in SERVED_RUNS))
            except UserMistake as error:
                raise _fail(str(error).replace("JOB.YAML", _job_words(kwargs)), 2) from None
            except (RaysvcError, TimeoutError) as error:
                raise _fail(error, 1) from None
            except OSError as error:
                if error.errno not in FILE_SYSTEM:
                    raise
                raise _fail(_as_mistake(error), 2) from None
            except KeyboardInterrupt as error:
                said = str(error) or "the same command goes on from what is finished"
                print(f"interrupted: {said}", file=sys.stderr)
                raise typer.Exit(interrupt.exit_code()) from None
            finally:
                # before the frames of a failed command go: Ray prints the errors of calls whose answers nobody asked for
                if "ray" in sys.modules:
                    from raysvc.cluster import leave

                    leave()

    signature = inspect.signature(function, eval_str=True)
    default = signature.parameters["config"].default if "config" in signature.parameters else None
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


def _as_mistake(error: OSError) -> UserMistake:
    """Returns what a file system refused, as a line that says what to do."""
    remedy = FILE_SYSTEM[error.errno or 0]
    return ConfigError(str(error.filename or "a file"), f"cannot be used ({error.strerror})", remedy)


def _say_version(asked: bool) -> None:
    if asked:
        from raysvc import __version__

        print(f"raysvc {__version__}")
        raise typer.Exit


def _set_loudness(*, verbose: bool, quiet: bool) -> None:
    logging.basicConfig(format="%(levelname)s %(name)s %(message)s", stream=sys.stderr)
    level = logging.INFO if verbose else logging.ERROR if quiet else logging.WARNING
    logging.getLogger().setLevel(level)
    show_progress(not quiet)


def _job_words(arguments: Mapping[str, Any]) -> str:
    """The words of this command that name its job, for a command that an error recommends."""
    words, config = arguments.get("overrides") or [], arguments.get("config")
    named = config is None or (words and "=" not in words[0])
    return shlex.join(words if named else [str(config), *words])


def _fail(error: Exception | str, code: int) -> typer.Exit:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return typer.Exit(code)
