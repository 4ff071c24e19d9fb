"""Which files of a folder or a pattern are rows."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from raysvc.errors import SourceError
from raysvc.job.config import SourceConfig
from raysvc.pipelines.reading.readers import read_rows
from raysvc.pipelines.sources import file_stamp, listing
from raysvc.pipelines.sources.listing import find_files
from raysvc.pipelines.sources.look import look_at
from raysvc.pipelines.sources.scan_memo import Memo
from raysvc.pipelines.sources.source import Source

from .test_sources import lines_of


def names(root: Path, *patterns: str) -> list[str]:
    config = SourceConfig(path=tuple(str(root / pattern) for pattern in patterns))
    return [str(Path(file.path).relative_to(root)) for file in find_files(config)]


def texts(source: Source) -> list[str]:
    return [row.data["text"] for piece in source.slices for row in read_rows(piece, {}) if row.data]


def put(path: Path, *rows: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lines_of([{"text": text} for text in rows]))


HIDDEN = (".a.jsonl", "_a.jsonl", ".ipynb_checkpoints/a.jsonl", "_old/a.jsonl", "b/.x/a.jsonl")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("a.jsonl", "b/c.jsonl", *HIDDEN):
        put(tmp_path / "data" / name, name)
    (tmp_path / "data" / "README.md").write_text("words")
    return tmp_path / "data"


@pytest.mark.parametrize("pattern", [".", "**/*.jsonl"])
def test_hidden_files_and_what_lies_in_hidden_folders_are_no_rows(tree: Path, pattern: str) -> None:
    assert names(tree, pattern) == ["a.jsonl", "b/c.jsonl"]


def test_a_pattern_that_says_so_names_hidden_files(tree: Path) -> None:
    assert names(tree, "_*.jsonl") == ["_a.jsonl"]
    assert names(tree, "_old") == ["_old/a.jsonl"]
    assert names(tree, ".a.jsonl", "_old/*.jsonl") == [".a.jsonl", "_old/a.jsonl"]


@pytest.mark.parametrize("pattern", ["", "/*.jsonl", "/**/*.jsonl"])
def test_a_remote_listing_leaves_out_hidden_names_too(pattern: str) -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    for name in ("a.jsonl", "_a.jsonl", ".x/a.jsonl"):
        fs.pipe_file(f"/listed/{name}", b'{"text": "1"}\n')
    found = find_files(SourceConfig(path=(f"memory://listed{pattern}",)))
    assert [file.path for file in found] == ["memory:///listed/a.jsonl"]


def test_a_name_with_signs_of_a_pattern_is_a_file_when_there_is_one(tmp_path: Path) -> None:
    put(tmp_path / "rows[1].jsonl", "one")
    assert names(tmp_path, "rows[1].jsonl") == ["rows[1].jsonl"]


def test_a_linked_folder_is_followed_and_a_circle_ends(tmp_path: Path) -> None:
    put(tmp_path / "elsewhere" / "far.jsonl", "far")
    put(tmp_path / "data" / "near.jsonl", "near")
    (tmp_path / "data" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "loop").symlink_to(tmp_path / "data")
    assert names(tmp_path, "data") == ["data/link/far.jsonl", "data/near.jsonl"]
    assert names(tmp_path, "data/*/far.jsonl") == ["data/link/far.jsonl"]


def test_a_folder_with_several_kinds_is_refused_and_the_files_are_named(tmp_path: Path) -> None:
    put(tmp_path / "a.jsonl", "one")
    (tmp_path / "b.csv").write_text("text\ntwo\n")
    with pytest.raises(SourceError, match=r"csv \(b\.csv\), lines \(a\.jsonl\)"):
        names(tmp_path, ".")
    assert names(tmp_path, "*.jsonl", "*.csv") == ["a.jsonl", "b.csv"]


def test_a_folder_of_save_to_disk_given_as_path_is_read_as_that(tmp_path: Path) -> None:
    import datasets

    rows = [{"text": f"row {number}"} for number in range(50)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "one"), num_shards=3)
    datasets.DatasetDict(train=datasets.Dataset.from_list(rows[:7])).save_to_disk(str(tmp_path / "many"))
    by_path = look_at(SourceConfig(path=(str(tmp_path / "one"),)), 100)
    by_name = look_at(SourceConfig(dataset=str(tmp_path / "one")), 100)
    assert texts(by_path) == [row["text"] for row in rows]
    assert (by_path.identity, by_path.slices) == (by_name.identity, by_name.slices)
    assert len(by_path.slices) > 3
    many = look_at(SourceConfig(path=(str(tmp_path / "many"),), split="train[2:5]"))
    assert texts(many) == ["row 2", "row 3", "row 4"]
    with pytest.raises(SourceError, match="train"):
        look_at(SourceConfig(path=(str(tmp_path / "many"),)))


@pytest.mark.parametrize("key", ["split", "subset", "revision"])
def test_a_part_of_a_dataset_is_not_silently_ignored_for_files(tmp_path: Path, key: str) -> None:
    put(tmp_path / "a.jsonl", "one")
    with pytest.raises(SourceError, match=rf"source\.{key}.*a\.jsonl is read whole; leave it out"):
        look_at(SourceConfig(path=(str(tmp_path / "a.jsonl"),), **{key: "train[:1]"}))


def test_a_saved_dataset_below_a_folder_is_named(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list([{"text": "x"}]).save_to_disk(str(tmp_path / "data" / "saved"))
    with pytest.raises(SourceError, match=r"saved.*save_to_disk"):
        look_at(SourceConfig(path=(str(tmp_path / "data"),)))


def test_a_saved_dataset_that_changed_after_the_scan_fails_by_name(tmp_path: Path) -> None:
    import datasets

    rows = [{"text": f"row {number}"} for number in range(50)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    source = look_at(SourceConfig(dataset=str(tmp_path / "saved")))
    slices = source.slices
    (file,) = (tmp_path / "saved").glob("*.arrow")
    file.write_bytes(file.read_bytes().replace(b"row 4", b"wor 4"))
    with pytest.raises(SourceError, match=r"\.arrow.*changed"):
        list(read_rows(slices[0], {}))


def test_a_mark_at_the_beginning_of_any_file_is_no_part_of_its_first_row(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps({"text": name}).encode())
    source = look_at(SourceConfig(path=(str(tmp_path),)))
    assert (source.first_row(), texts(source), len(source.slices)) == ({"text": "a"}, ["a", "b"], 1)


def test_three_thousand_small_files_are_few_slices_and_few_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_stamp, "RACY_S", -3600.0)
    (tmp_path / "data").mkdir()
    for number in range(3_000):
        (tmp_path / "data" / f"{number:05}.jsonl").write_bytes(b'{"text": "%d"}\n' % number)
    from raysvc.cache.store.open import open_store

    for _ in range(2):
        memo = Memo(open_store(str(tmp_path / "root")))
        source = look_at(SourceConfig(path=(str(tmp_path / "data"),)), None, memo)
        assert len(source.slices) <= 10
    assert texts(source) == [str(number) for number in range(3_000)]
    assert len(list((tmp_path / "root" / ".scans").iterdir())) < 200


def test_one_changed_file_of_many_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from raysvc.cache.store.open import open_store

    monkeypatch.setattr(file_stamp, "RACY_S", -3600.0)
    for number in range(300):
        put(tmp_path / "data" / f"{number:03}.jsonl", str(number))
    config = SourceConfig(path=(str(tmp_path / "data"),))
    first = look_at(config, None, Memo(open_store(str(tmp_path / "root"))))
    assert first.slices
    put(tmp_path / "data" / "123.jsonl", "other")
    second = look_at(config, None, Memo(open_store(str(tmp_path / "root"))))
    differ = [
        place
        for place, pair in enumerate(zip(first.identity, second.identity, strict=True))
        if pair[0] != pair[1]
    ]
    assert differ == [123]
    assert texts(second)[122:125] == ["122", "other", "124"]


def test_a_link_that_leads_nowhere_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "gone.jsonl")
    for path in (tmp_path, tmp_path / "*.jsonl", tmp_path / "b.jsonl"):
        with pytest.raises(SourceError, match=r"b\.jsonl' is a link to a file that is not there"):
            find_files(SourceConfig(path=(str(path),)))


def test_a_dead_store_is_refused_soon_and_its_secret_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes connections and never answers, and one that is not there."""
    assert listing.FIRST_ANSWER_S == 10.0
    monkeypatch.setattr(listing, "FIRST_ANSWER_S", 0.5)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        for _ in range(2):
            options = {
                "endpoint_url": f"http://127.0.0.1:{server.getsockname()[1]}",
                "key": "a",
                "secret": "SECRET",
            }
            with pytest.raises(SourceError, match="did not answer") as caught:
                find_files(SourceConfig(path=("s3://dead/*.jsonl",), storage_options=options))
            assert "SECRET" not in str(caught.value)
            server.listen()


def test_what_a_store_raises_is_a_source_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class EndpointConnectionError(Exception):
        """As that of botocore: no OSError."""

    def isdir(self: MemoryFileSystem, path: str) -> bool:
        raise EndpointConnectionError("no such host")

    monkeypatch.setattr(MemoryFileSystem, "isdir", isdir)
    with pytest.raises(SourceError, match="cannot be listed: no such host"):
        find_files(SourceConfig(path=("memory://x/*.jsonl",)))


def test_why_a_web_server_gives_no_file_is_said() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{server.getsockname()[1]}/x.jsonl"
        with pytest.raises(SourceError, match=r"cannot be listed: Cannot connect to host 127\.0\.0\.1"):
            find_files(SourceConfig(path=(url,)))


@pytest.mark.parametrize("path", ["/" + "x" * 5000 + ".jsonl", "~nobody-of-this-name/x.jsonl"])
def test_a_path_that_no_file_can_have_is_a_source_error(path: str) -> None:
    with pytest.raises(SourceError):
        look_at(SourceConfig(path=(path,)))


@pytest.mark.parametrize(
    "patterns", [("a.jsonl", "a.jsonl"), ("a.jsonl", "*.jsonl"), (".", "b"), ("a.jsonl", "b/../a.jsonl")]
)
def test_a_file_that_is_named_twice_is_refused_and_not_read_once(
    tree: Path, patterns: tuple[str, str]
) -> None:
    twice = "b/c.jsonl" if "b" in patterns else "a.jsonl"
    with pytest.raises(SourceError, match=rf"names '.*{twice}' more than once"):
        names(tree, *patterns)
