"""Keeps what was found out about source files beside the entries, so that a warm start does not read them again.

A record lies in `<root>/.scans/<hash of what it is about>.json`. What it is about includes the file's stamp, so
a file that changed has no record: nothing is ever changed or renamed over.

Always true:
- a record saves reading and decides nothing: without it the same answer comes from the file;
- a record that is damaged, too large, or about something else counts as none;
- a root that cannot be written has no records, and one that cannot be read is an error at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from raysvc.cache import names
from raysvc.cache.key import canonical_json
from raysvc.cache.local.sealed import SEAL, seal_of, sealed
from raysvc.cache.store.store import Store
from raysvc.errors import StoreError

MAX_BYTES = 16 << 20
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Memo:
    """The records of one cache root."""

    store: Store

    def get(self, about: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns what was kept, None when there is nothing that can be believed.

        Args:
            about: plain JSON that says what the record is of.
        """
        path = _path(about)
        if path.rpartition("/")[2] not in self._names:
            return None
        with contextlib.suppress(FileNotFoundError):
            return _opened(self.store.read(path, 0, MAX_BYTES + 1), about)
        return None

    def put(self, about: Mapping[str, Any], value: Mapping[str, Any]) -> None:
        """Keep a value, if the root can be written; what was kept wrongly is replaced."""
        path = _path(about)
        fields = {"about": dict(about), "value": dict(value)}
        try:
            if path.rpartition("/")[2] in self._names:
                self.store.delete(path)
            self.store.create(path, sealed(fields))
        except (StoreError, OSError) as error:
            logger.info("scan not kept root=%s error=%s", self.store.url, error)

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.store.list(names.SCANS))


def _path(about: Mapping[str, Any]) -> str:
    return f"{names.SCANS}/{hashlib.sha256(canonical_json(dict(about))).hexdigest()}.json"


def _opened(data: bytes, about: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        raw = json.loads(data) if len(data) <= MAX_BYTES else {}
        seal = raw.pop(SEAL, None)
        if seal != seal_of(raw) or raw["about"] != dict(about) or not isinstance(raw["value"], dict):
            return None
        return dict(raw["value"])
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return None
