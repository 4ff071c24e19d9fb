"""No row is trained whose bytes are not those that were written; no file of an entry ends in an untyped error."""

from __future__ import annotations

import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.builds.cache_entry import open_entry
from raysvc.builds.entry_report import Report
from raysvc.cache import manifest, names
from raysvc.cache.find import find_entry
from raysvc.cache.key import cache_key
from raysvc.cache.local.checksum import BLOCK, block_checksum
from raysvc.cache.local.sealed import sealed
from raysvc.cache.manifest import Manifest, Receipt
from raysvc.cache.names import new_part
from raysvc.cache.part_info import PartInfo
from raysvc.cache.parts import decode_part, encode_part
from raysvc.cache.store.open import open_store
from raysvc.cache.writer import EntryWriter
from raysvc.errors import EntryError, RaysvcError, TokenizerError

from .helpers import KEY, RECIPE, build, make_table

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """An entry with one part of many blocks, and the part's bytes."""
    root = tmp_path_factory.mktemp("large")
    build(open_store(str(root)), [make_table(4000, max_length=256)])
    (path,) = (root / KEY).glob("part-*")
    return path, path.read_bytes()


def opened(path: Path) -> Any:
    return find_entry(open_store(str(path.parents[1])), KEY)


def test_a_flipped_bit_anywhere_in_a_local_part_is_never_served(large):
    path, sound = large
    assert len(sound) > 8 * BLOCK
    ids = make_table(4000, max_length=256)["input_ids"].combine_chunks()
    expected = [ids.slice(first, 500).flatten().to_numpy() for first in range(0, 4000, 500)]
    for place in np.random.default_rng(0).integers(0, len(sound), 60).tolist():
        damaged = bytearray(sound)
        damaged[place] ^= 1 << (place % 8)
        path.write_bytes(damaged)
        entry, refused = opened(path), 0
        for number, sound_ids in enumerate(expected):
            try:
                batch = entry.read(entry.row_ids(500 * number, 500 * number + 500))
            except EntryError:
                refused += 1
                continue
            assert np.array_equal(batch.tokens["input_ids"], sound_ids)
        assert refused, place
    path.write_bytes(sound)


def test_a_random_row_compares_its_own_blocks_and_no_others(large):
    path, _ = large
    entry = opened(path)
    entry.row(2000)
    blocks = entry.parts._views[0].blocks
    assert 1 <= blocks._checked.sum() < len(blocks._checked) / 2
    entry.read(entry.row_ids(0, 4000))
    assert blocks.is_done


def test_the_checksums_of_blocks_are_those_of_the_bytes(large):
    path, sound = large
    (part,) = opened(path).manifest.parts
    cut = [sound[at : at + BLOCK] for at in range(0, len(sound), BLOCK)]
    assert part.blocks == "".join(block_checksum(block) for block in cut)


def test_an_early_entry_without_checksums_of_blocks_is_compared_whole(large):
    from dataclasses import replace

    path, sound = large
    (part,) = opened(path).manifest.parts
    early = replace(part, blocks="")
    assert decode_part(pa.py_buffer(sound), early, "here").table.num_rows == 4000
    damaged = bytearray(sound)
    damaged[len(sound) // 2] ^= 1
    view = decode_part(pa.py_buffer(sound), early, "here")
    assert view.blocks.is_done
    with pytest.raises(EntryError, match="checksum"):
        decode_part(pa.py_buffer(bytes(damaged)), early, "here")


def test_a_manifest_that_nobody_would_read_is_not_written(tmp_path, monkeypatch):
    store = open_store(str(tmp_path))
    monkeypatch.setattr(manifest, "MAX_BYTES", 500)
    with pytest.raises(EntryError, match=r"3 parts.*500 are read.*fewer files"):
        build(store)
    assert names.MANIFEST not in store.list(KEY)
    monkeypatch.undo()
    assert find_entry(store, KEY) is None
    build(store)
    assert find_entry(store, KEY).num_rows == 12


def test_a_build_that_resumes_makes_a_damaged_part_again(tmp_path, caplog):
    store = open_store(str(tmp_path))
    slices = [make_table(50), make_table(50, first_row=50)]
    for index, table in enumerate(slices):
        EntryWriter(store, KEY).write_part(index, table, {})
    path = next((tmp_path / KEY).glob("part-00001-*"))
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    assert set(EntryWriter(store, KEY).receipts()) == {0}
    assert path.name in caplog.text
    build(store, slices)
    assert find_entry(store, KEY).verify() == []
    assert find_entry(store, KEY).table()["source_row"].to_pylist() == list(range(100))


KINDS: dict[str, pa.Array] = {
    "date": pa.array([datetime.date(2026, 1, 1)] * 2),
    "time": pa.array([datetime.time(1)] * 2),
    "timestamp": pa.array([0, 1], pa.timestamp("us", "UTC")),
    "duration": pa.array([0, 1], pa.duration("s")),
    "decimal": pa.array([decimal.Decimal("1.5")] * 2),
    "binary": pa.array([b"a", b"b"]),
    "fixed_binary": pa.array([b"ab", b"cd"], pa.binary(2)),
    "struct": pa.array([{"a": 1}, {"a": 2}]),
    "map": pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int32())),
    "dictionary": pa.array(["a", "b"]).dictionary_encode(),
    "null": pa.nulls(2),
    "list_of_lists": pa.array([[[1]], [[2]]]),
    "fixed_list": pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2)),
    "list_view": pa.array([[1], [2]], pa.list_view(pa.int32())),
    "string_view": pa.array(["a", "b"], pa.string_view()),
    "list_of_text": pa.array([["a"], ["b"]]),
    "run_end": pa.RunEndEncodedArray.from_arrays([2], [1]),
    "interval": pa.array([None, None], pa.month_day_nano_interval()),
    "large_list": pa.array([[1], [2]], pa.large_list(pa.int32())),
    "fixed_list_of_one": pa.array([[1.0], [2.0]], pa.list_(pa.float32(), 1)),
}
KEPT = ("large_list", "fixed_list", "fixed_list_of_one")  # values of a shape, and lists of another layout
GOOD = {
    "input_ids": pa.array([[1], [2]], pa.list_(pa.int32())),
    "loss_mask": pa.array([[1], [0]], pa.list_(pa.uint8())),
}


def part_of(columns: dict[str, pa.Array]) -> tuple[pa.Buffer, PartInfo]:
    """A part as somebody else would write it, with everything right but its columns."""
    table = pa.table(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data = sink.getvalue()
    return data, PartInfo(new_part(0)[0], 2, 2, data.size, "0" * 32, 0, "0" * 32)


@pytest.mark.parametrize("name", ["extra", "input_ids", "loss_mask"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_column_of_a_type_that_no_part_holds_is_a_typed_error(kind, name):
    buffer, info = part_of(GOOD | {name: KINDS[kind]})
    for columns in (None, {"input_ids": "list<int32>", "loss_mask": "list<uint8>"}):
        if columns is None and name == "extra" and kind in KEPT[1:]:
            continue
        with pytest.raises(EntryError, match="part-00000"):
            decode_part(buffer, info, "here", columns, checked=True)


def test_ids_of_another_type_are_a_typed_error():
    for name, values in (("input_ids", [[1.0], [2.0]]), ("loss_mask", [[0.5], [1.0]])):
        buffer, info = part_of(GOOD | {name: pa.array(values)})
        with pytest.raises(EntryError, match=f"{name}.*must be"):
            decode_part(buffer, info, "here", checked=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_with_such_a_column_is_refused_by_name_or_kept_as_it_is(kind):
    table = pa.table(GOOD | {"extra": KINDS[kind]})
    if kind not in KEPT:
        with pytest.raises(EntryError, match="column extra"):
            encode_part(new_part(0)[0], table)
        return
    part = encode_part(new_part(0)[0], table)
    view = decode_part(pa.py_buffer(part.data), part.info, "here", part.columns)
    assert view.table["extra"].to_pylist() == table["extra"].to_pylist()


def test_columns_that_the_manifest_does_not_name_are_refused():
    buffer, info = part_of(GOOD | {"reward": pa.array([1.0, 2.0])})
    with pytest.raises(EntryError, match="its columns are"):
        decode_part(buffer, info, "here", {"input_ids": "list<int32>", "loss_mask": "list<uint8>"}, True)


def test_lists_of_other_lengths_and_nulls_are_refused():
    for other in ([[1, 1], []], [[None], [1]], [None, [1, 1]]):
        buffer, info = part_of(GOOD | {"loss_mask": pa.array(other, pa.list_(pa.uint8()))})
        with pytest.raises(EntryError, match="it is damaged"):
            decode_part(buffer, info, "here", checked=True)


@given(st.data())
@settings(max_examples=300)
def test_a_manifest_with_any_field_changed_is_a_typed_error_or_whole(data):
    """Structure-aware: a field somewhere in the tree is replaced, and the checksum made right again."""
    part = PartInfo(new_part(0)[0], 1, 1, 4096, "0" * 32, 64, "1" * 32, "2" * 16)
    columns = {"input_ids": "list<int32>", "loss_mask": "list<uint8>"}
    documents = [
        (Manifest, Manifest(KEY, (part,), columns, RECIPE, {"paths": ["a"]}).to_json()),
        (Receipt, Receipt(0, part, columns, {"row_counts": {}}).to_json()),
    ]
    kind, text = data.draw(st.sampled_from(documents))
    raw = json.loads(text)
    del raw["sha256"]
    place: Any = raw
    while True:
        step = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        inside = place[step]
        if not isinstance(inside, dict | list) or not inside or data.draw(st.booleans()):
            break
        place = inside
    if data.draw(st.booleans()):
        place[step] = data.draw(JSON)
    elif isinstance(place, dict):
        del place[step]
    try:
        read = kind.from_json(sealed(raw), "here")
    except EntryError:
        return
    assert kind.from_json(read.to_json(), "here") == read


@given(
    st.dictionaries(
        st.sampled_from(["paths", "row_counts", "examples", "verification", "encoders", "seconds"]), JSON
    )
)
@settings(max_examples=100)
def test_a_report_of_any_shape_is_a_typed_error_or_usable(fields):
    try:
        report = Report(fields, "here")
        ", ".join(report["paths"])
        sum(report["encoders"].values())
        [example["reason"] for example in report["examples"]]
    except EntryError:
        return


class TestTokenizer:
    """An entry brings its tokenizer as bytes, never as a name or a flag."""

    def entry(self, root: Path, sample: dict[str, str], **report: Any) -> Path:
        from raysvc.chat.tokens.tokenizer import LoadedTokenizer
        from raysvc.job.config import TokenizerConfig

        loaded = LoadedTokenizer(TokenizerConfig(name=sample["tokenizer"]))
        ids = loaded.hf("What is 1+1?")["input_ids"]
        table = pa.table(
            {
                "input_ids": pa.array([ids], pa.list_(pa.int32())),
                "loss_mask": pa.array([[1] * len(ids)], pa.list_(pa.uint8())),
            }
        )
        recipe = {"tokenizer": loaded.identity()}
        writer = EntryWriter(open_store(str(root)), cache_key(recipe))
        writer.commit([writer.write_part(0, table, {})], recipe, report, loaded.content())
        return root / writer.folder

    def test_an_entry_that_was_moved_decodes_without_its_builders_path(self, tmp_path, sample):
        moved = tmp_path / "elsewhere"
        self.entry(tmp_path, sample, tokenizer={"name": "/no/such/folder"}).rename(
            moved.parent / cache_key({})
        )
        (folder,) = tmp_path.glob("[0-9a-f]*")
        folder.rename(tmp_path / json.loads((folder / "manifest.json").read_text())["key"])
        (folder,) = tmp_path.glob("[0-9a-f]*")
        entry = open_entry(str(folder))
        assert entry[0].text == "What is 1+1?"
        assert entry[0].spans == [("What is 1+1?", True)]

    def test_code_beside_a_manifest_is_never_run(self, tmp_path, sample):
        evil = tmp_path / "evil"
        evil.mkdir()
        mark = tmp_path / "code-ran"
        (evil / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nraise SystemExit\n")
        auto = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
        (evil / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto, "tokenizer_class": "Evil"}))
        (evil / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto}))
        named = {"name": str(evil), "trust_remote_code": True}
        entry = open_entry(str(self.entry(tmp_path / "cache", sample, tokenizer=named)))
        assert entry[0].text == "What is 1+1?"
        assert not mark.exists()

    def test_other_bytes_than_the_recipe_names_are_refused(self, tmp_path, sample):
        folder = self.entry(tmp_path, sample)
        (folder / "tokenizer.json").write_bytes(b"{}")
        with pytest.raises(EntryError, match=r"tokenizer\.json: its bytes are not those"):
            str(open_entry(str(folder))[0].text)
        (folder / "tokenizer.json").unlink()
        with pytest.raises(TokenizerError, match="keeps no tokenizer"):
            str(open_entry(str(folder))[0].text)

    @pytest.mark.parametrize("content", [b"{}", b"\xff", b"[" * 10_000, b'{"model": 3}'])
    def test_bytes_that_are_no_tokenizer_are_a_typed_error(self, tmp_path, sample, content):
        import hashlib

        recipe = {"tokenizer": {"content_sha256": hashlib.sha256(content).hexdigest(), "special_tokens": 3}}
        writer = EntryWriter(open_store(str(tmp_path)), cache_key(recipe))
        writer.commit([writer.write_part(0, make_table(3), {})], recipe, {}, content)
        with pytest.raises(RaysvcError, match=r"tokenizer\.json: it is not a tokenizer"):
            _ = open_entry(writer.uri).tokenizer
