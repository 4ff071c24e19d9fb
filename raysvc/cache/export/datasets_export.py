"""The two small JSON files that let `datasets.load_from_disk` open an entry as it is.

They follow from the manifest alone, so whoever finds them missing writes the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from raysvc.cache import names
from raysvc.cache.manifest import Manifest
from raysvc.cache.store.store import Store


def datasets_files(manifest: Manifest) -> dict[str, bytes]:
    """File name -> bytes, in the order in which they are to be written; none where columns lie in several folders."""
    if manifest.base:
        return {}
    features = {name: _feature(kind) for name, kind in manifest.columns.items()}
    info = {"features": features, "description": "", "citation": "", "homepage": "", "license": ""}
    state: dict[str, Any] = {
        "_data_files": [{"filename": part.name} for part in manifest.parts],
        "_fingerprint": manifest.key[:64],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    return {names.DATASET_INFO: _json(info), names.STATE: _json(state)}


def ensure_datasets_files(store: Store, folder: str, manifest: Manifest) -> None:
    """Write what is missing of them."""
    there = {item.name for item in store.scan(folder, names.MANY)}
    for name, data in datasets_files(manifest).items():
        if name not in there:
            store.create(f"{folder}/{name}", data)


def _feature(kind: str) -> dict[str, Any]:
    if kind.startswith("list<"):
        return {"feature": _feature(kind[5:-1]), "_type": "List"}
    name, _, shape = kind.rstrip("]").partition("[")
    feature: dict[str, Any] = {"dtype": name.replace("bfloat16", "uint16"), "_type": "Value"}
    for size in reversed(shape.split(",") if shape else []):
        feature = {"feature": feature, "length": int(size), "_type": "List"}
    return feature


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True).encode()
