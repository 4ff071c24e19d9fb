"""Records what a run was served from which step on: `<run_dir>/served.jsonl`, so that any step can be made again.

    {"step": 0, "dp_size": 2, "spec": {"name": ..., "sources": [...], "plan": {...}, ...}}

A server whose trainer is not ours keeps the same lines itself, as records beside its leases; see `raysvc.actors.server.kept.served_records`.

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

from raysvc.cache.local.sealed import SEAL, seal_of
from raysvc.cache.store.open import open_store
from raysvc.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from raysvc.actors.server.spec import ServeSpec

FILE = "served.jsonl"


@dataclass(frozen=True)
class ServeRecord:
    """Records how the steps from `step` on were made.

    Attributes:
        dp_size: ranks of the trainer; None where only the trainer knows.
        spec: of the server.
    """

    step: int
    dp_size: int | None
    spec: ServeSpec


def read_served(
    run_dir: str, step: int, storage_options: Mapping[str, Any] | None = None
) -> ServeRecord | None:
    """Returns how `step` was made; None if no run wrote it down.

    Raises:
        ConfigError, StoreError: a file is damaged.
    """
    from raysvc.actors.server.kept.served_records import ServedRecords
    from raysvc.actors.server.spec import ServeSpec

    path, store = f"{run_dir}/{FILE}", open_store(run_dir, storage_options)
    try:
        text = store.read(FILE) if FILE in store.list() else b""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith(b"\n")]
        lines = lines or ServedRecords(f"{run_dir}/server", storage_options or {}).lines()
        if any(line.pop(SEAL, None) != seal_of(line) for line in lines):
            raise ValueError("a line is not what was written")
        fitting = [line for line in lines if line["step"] <= step]
        if not fitting:
            return None
        last = fitting[-1]
        spec = ServeSpec.model_validate({**last["spec"], "storage_options": dict(storage_options or {})})
        return ServeRecord(last["step"], last["dp_size"], spec)
    except StoreError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        what = f"cannot be understood ({type(error).__name__})"
        raise ConfigError(path, what, "delete it, and the plan of the job file is used") from None
