"""Extension types of Arrow: what a value of one means, where its storage type alone does not say it.

| type | in the row |
|---|---|
| `arrow.json` (`Json` of `datasets`, JSON of Parquet) | the value of the JSON text |
| `arrow.uuid` | its text |
| `arrow.bool8` | true or false |
| `arrow.fixed_shape_tensor` | lists in lists, in the order of its axes |
| `Array2D` to `Array5D` of `datasets` | lists in lists, as stored |
| tensors of Ray Data | lists in lists |
| pickled objects of Ray Data | refused before a value of it is read |
| any other | `UnreadableValue`: a row that uses it is quarantined, and the reason names the type |

Always true:
- a type is told by its name, whether or not this process has registered it: one that is not registered comes as its
  storage type, with its name in the metadata of the field.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from raysvc.chat.source.json_rows import UnreadableValue, load_json

Convert = Callable[[Any], Any]
_NAME = b"ARROW:extension:name"
_RAY_TENSORS = tuple(f"ray.data.arrow_{kind}" for kind in ("tensor", "tensor_v2", "variable_shaped_tensor"))
_PICKLED = "ray.data.arrow_pickled_object"
_ARRAYS = tuple(f"datasets.features.features.Array{axes}DExtensionType" for axes in range(2, 6))


def extension_name(field: pa.Field) -> str | None:
    """The name of a field's extension type; None: it has none."""
    if isinstance(field.type, pa.BaseExtensionType):
        return str(field.type.extension_name)
    return (field.metadata or {}).get(_NAME, b"").decode(errors="replace") or None


def holds_pickles(field: pa.Field) -> bool:
    """Returns whether values of a field are objects that Ray Data has pickled, which run code when they are read."""
    kind = _stored(field.type)
    inner = (kind.field(place) for place in range(kind.num_fields)) if pa.types.is_nested(kind) else ()
    return extension_name(field) == _PICKLED or any(map(holds_pickles, inner))


def reader_of(name: str, kind: pa.DataType) -> Convert | None:
    """Returns what makes a row's value of what Arrow gives for a value of the type; None: it is the same."""
    return READERS.get(name, _refused)(name, kind)


def _refused(name: str, kind: pa.DataType) -> Convert:
    refused = UnreadableValue(
        f"it is of Arrow's extension type {name!r}, which says more than its {_stored(kind)}"
    )
    return lambda _: refused


def _stored(kind: pa.DataType) -> pa.DataType:
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _as_stored(name: str, kind: pa.DataType) -> None:
    return None


def _json(name: str, kind: pa.DataType) -> Convert:
    def convert(text: str) -> Any:
        try:
            return load_json(text.encode(), allow_nan=True)
        except (ValueError, RecursionError) as broken:
            return UnreadableValue(f"its JSON is broken: {broken}")

    return convert


def _uuid(name: str, kind: pa.DataType) -> Convert:
    return lambda value: str(uuid.UUID(bytes=value) if isinstance(value, bytes) else value)


def _bool8(name: str, kind: pa.DataType) -> Convert:
    return bool


def _tensor(name: str, kind: pa.DataType) -> Convert:
    if not isinstance(kind, pa.BaseExtensionType):  # its shape is known to the type alone
        return _refused(name, kind)
    axes = kind.permutation or range(len(kind.shape))

    def convert(values: list[Any]) -> Any:
        return np.array(values, object).reshape(kind.shape).transpose(axes).tolist()

    return convert


def _of_ray(name: str, kind: pa.DataType) -> Convert:
    return lambda value: value.tolist() if isinstance(value, np.ndarray) else _refused(name, kind)(value)


READERS: dict[str, Callable[[str, pa.DataType], Convert | None]] = {
    "arrow.json": _json,
    "arrow.uuid": _uuid,
    "arrow.bool8": _bool8,
    "arrow.fixed_shape_tensor": _tensor,
    **dict.fromkeys(_ARRAYS, _as_stored),
    **dict.fromkeys(_RAY_TENSORS, _of_ray),
}
