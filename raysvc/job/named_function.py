"""Functions of the user that a job names: `package.module:function`.

Always true:
- only what a job says is imported, never what an entry or a run folder says;
- whatever the user's code raises is told with the line that raised it.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raysvc.errors import ConfigError


def function_of(where: str, name: str, takes: str) -> Callable[..., Any]:
    """The function of a name.

    Args:
        where: key of the job.
        name: "module:name".
        takes: its arguments, for messages.

    Raises:
        ConfigError: there is no such function.
    """
    module, _, attribute = name.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        remedy = "make it importable where the server runs: install it, put its folder on PYTHONPATH, or into the job's working_dir"
        raise ConfigError(where, f"{name} cannot be imported: {error}", remedy) from error
    except Exception as error:  # of the user's module: whatever it is, it is named
        what = f"{name} cannot be imported: {type(error).__name__}: {error}{line_of(error, -1)}"
        raise ConfigError(where, what, "correct the module") from error
    if not callable(found):
        raise ConfigError(where, f"{name} cannot be called", f"name a function of {takes}")
    function: Callable[..., Any] = found
    return function


def line_of(error: Exception, frame: int) -> str:
    """Says where the user's code raised, by the frame below ours; empty if it was not reached."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    if not frames or isinstance(error, SyntaxError):
        return ""
    return f" ({Path(frames[frame].filename).name}, line {frames[frame].lineno})"
