"""Records how steps were made for a trainer that is not ours, beside the server's leases.

    served/000000000000.json    {"step": 0, "dp_size": null, "spec": {...}}

Always true:
- the last record whose step is not above k says how step k was made;
- a record is created once and never changed; a server that is started again with the same spec adds none;
- credentials are not in it;
- it carries its checksum: a changed byte would name another entry, seed or step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from raysvc.actors.server.spec import ServeSpec
from raysvc.cache.local.sealed import SEAL, seal_of
from raysvc.cache.store.claim import Claim, open_owned
from raysvc.errors import StoreError

# credentials, and what decides no step
NOT_KEPT: Any = {"storage_options": True, "evals": True, "rollouts": {"prompts": {"storage_options"}}}


def served_line(step: int, dp_size: int | None, spec: ServeSpec, **more: int) -> dict[str, Any]:
    """Describes how the steps from `step` on are made; its ranks are None if only the trainer knows them."""
    kept = spec.lasting().model_dump(mode="json", exclude=NOT_KEPT)
    line = {"step": step, "dp_size": dp_size, "spec": kept, **more}
    return {**line, SEAL: seal_of(line)}


class ServedRecords:
    """A folder beside the journal; only the owner of that folder writes."""

    def __init__(self, journal: str, storage_options: Mapping[str, Any], claim: Claim | None = None) -> None:
        self._store = open_owned(f"{journal}/served", storage_options, claim)

    def lines(self) -> list[dict[str, Any]]:
        """All of them, in the order in which they were made.

        Raises:
            StoreError: one is damaged.
        """
        return [self._line(name) for name in sorted(self._store.list()) if name.endswith(".json")]

    def _line(self, name: str) -> dict[str, Any]:
        data = self._store.read(name)
        try:
            line: dict[str, Any] = json.loads(data)
            if (
                line[SEAL] == seal_of({key: line[key] for key in line if key != SEAL})
                and _bytes_of(line) == data
                and line.get("number") in (None, int(name.removesuffix(".json")))
            ):
                return line
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        remedy = "restore it; or remove it, and no step from it on is replayed"
        raise StoreError(f"{self._store.url}/{name}", "is not what was written", remedy)

    def keep(self, step: int, spec: ServeSpec) -> None:
        """Say how the steps from here on are made."""
        lines = self.lines()
        number = len(lines)
        line = served_line(step, None, spec, number=number)
        if lines and lines[-1]["spec"] == line["spec"]:
            return
        while not self._store.create(f"{number:012d}.json", _bytes_of(line)):
            number += 1  # an earlier owner came that far
            line = served_line(step, None, spec, number=number)


def _bytes_of(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line).encode()
