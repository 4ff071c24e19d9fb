"""What a run was served from which step on: `<run_dir>/served.jsonl`, so that any step can be made again.

    {"step": 0, "dp_size": 2, "spec": {"name": ..., "entry_uri": ..., "plan": {...}, ...}}

Always true:
- the last line whose step is not above k says how step k was made;
- a run that goes on from step k forgets the lines from k on, like its other logs, and adds its own;
- credentials are not in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raysvc.errors import ConfigError

if TYPE_CHECKING:
    from raysvc.actors.server.spec import ServeSpec

FILE = "served.jsonl"


@dataclass(frozen=True)
class Served:
    """How the steps from `step` on were made.

    Attributes:
        dp_size: ranks of the trainer; None where only the trainer knows.
        spec: of the server.
    """

    step: int
    dp_size: int | None
    spec: ServeSpec


def served_line(step: int, dp_size: int | None, spec: ServeSpec) -> dict[str, Any]:
    """A line of the file."""
    kept = spec.model_dump(mode="json", exclude={"storage_options", "evals", "growing"})
    return {"step": step, "dp_size": dp_size, "spec": kept}


def write_served(run_dir: str, spec: ServeSpec) -> None:
    """Say how a run is served whose trainer is not ours."""
    import fsspec

    line = json.dumps(served_line(0, None, spec), separators=(",", ":")) + "\n"
    with fsspec.open(f"{run_dir}/{FILE}", "wt", auto_mkdir=True, **spec.storage_options) as file:
        file.write(line)


def read_served(run_dir: str, step: int, storage_options: Mapping[str, Any] | None = None) -> Served | None:
    """How `step` was made; None where no run wrote it down.

    Raises:
        ConfigError: the file is damaged.
    """
    import fsspec

    from raysvc.actors.server.spec import ServeSpec

    path = f"{run_dir}/{FILE}"
    try:
        with fsspec.open(path, "rt", **(storage_options or {})) as file:
            lines = [json.loads(line) for line in file if line.endswith("\n")]
        fitting = [line for line in lines if line["step"] <= step]
        if not fitting:
            return None
        last = fitting[-1]
        spec = ServeSpec.model_validate({**last["spec"], "storage_options": dict(storage_options or {})})
        return Served(last["step"], last["dp_size"], spec)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        what = f"cannot be understood ({type(error).__name__})"
        raise ConfigError(path, what, "delete it, and the plan of the job file is used") from None
