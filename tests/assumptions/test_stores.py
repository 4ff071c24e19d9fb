"""What we assume of POSIX, fsspec and s3fs, tried on them."""

from __future__ import annotations

import errno
import inspect
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest


def test_link_has_one_winner_and_never_replaces(tmp_path: Path) -> None:
    """Of many hard links to one name exactly one is made, and the others get FileExistsError."""
    names = [tmp_path / f"rival-{index}" for index in range(16)]
    for name in names:
        name.write_text(name.name)
    start = threading.Barrier(len(names))

    def link(name: Path) -> bool:
        start.wait()
        try:
            os.link(name, tmp_path / "taken")
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(len(names)) as pool:
        won = list(pool.map(link, names))
    assert won.count(True) == 1
    assert (tmp_path / "taken").read_text() == names[won.index(True)].name


def test_an_open_file_follows_its_inode_not_its_path(tmp_path: Path) -> None:
    """Who appends to a file that was replaced, or whose folder was moved, does not touch what lies at the path."""
    (tmp_path / "a").mkdir()
    log, draft = tmp_path / "a" / "log", tmp_path / "a" / "draft"
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    draft.write_text("successor\n")
    draft.rename(log)
    os.write(file, b"sleeper\n")
    assert log.read_text() == "successor\n"
    (tmp_path / "a").rename(tmp_path / "b")
    (tmp_path / "a").mkdir()
    os.write(file, b"sleeper\n")
    os.close(file)
    assert list((tmp_path / "a").iterdir()) == []


def test_a_listing_shows_what_was_linked_before_it(tmp_path: Path) -> None:
    """A name that `link` made is in every listing that begins after it returned."""
    (tmp_path / "source").write_text("")
    for number in range(200):
        os.link(tmp_path / "source", tmp_path / f"{number}")
        assert f"{number}" in os.listdir(tmp_path)


def test_a_process_number_is_told_apart_by_its_start() -> None:
    """Field 22 of /proc/PID/stat is the start of a process, and stays while it is stopped."""
    fields = Path(f"/proc/{os.getpid()}/stat").read_text().rpartition(")")[2].split()
    assert int(fields[19]) > 0
    assert fields[0] == "R"
    assert len(Path("/proc/sys/kernel/random/boot_id").read_text().strip()) == 36
    assert os.stat("/proc/self/ns/pid").st_ino > 0


def test_fsspec_knows_create_mode_where_we_use_it() -> None:
    """`pipe_file` of s3fs and of fsspec's memory store takes `mode="create"`."""
    from fsspec.implementations.memory import MemoryFileSystem
    from s3fs import S3FileSystem

    assert "mode" in inspect.signature(S3FileSystem._pipe_file).parameters
    assert "mode" in inspect.signature(MemoryFileSystem.pipe_file).parameters


def test_memory_refuses_to_create_what_is_there() -> None:
    """`memory://` raises FileExistsError for a name that is taken."""
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/assumed/one", b"1", mode="create")
    with pytest.raises(FileExistsError):
        fs.pipe_file("/assumed/one", b"2", mode="create")
    assert fs.cat_file("/assumed/one") == b"1"
    fs.rm("/assumed", recursive=True)


@pytest.fixture(scope="module")
def bucket(s3_server: Any) -> tuple[Any, str]:
    """s3fs as our store opens it, and a folder of its own."""
    fs = fsspec.filesystem("s3", **s3_server.options, use_listings_cache=False, skip_instance_cache=True)
    return fs, f"raysvc-tests/assumed-{os.getpid()}"


def test_s3fs_sends_one_put_with_if_none_match(
    bucket: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `create` below the chunk size is one `put_object` with `IfNoneMatch="*"`, never a multipart upload."""
    fs, folder = bucket
    calls: list[tuple[str, Any]] = []
    call = type(fs)._call_s3

    async def seen(self: Any, method: str, *args: Any, **named: Any) -> Any:
        calls.append((method, named.get("IfNoneMatch")))
        return await call(self, method, *args, **named)

    monkeypatch.setattr(type(fs), "_call_s3", seen)
    fs.pipe_file(f"{folder}/once", b"x" * 100_000, mode="create", chunksize=100_001)
    assert calls == [("put_object", "*")]


def test_s3_refuses_to_create_what_is_there_and_a_plain_write_does_not(bucket: tuple[Any, str]) -> None:
    """A refusal is FileExistsError, or an OSError whose cause has the status 412; a plain `pipe_file` writes over."""
    fs, folder = bucket
    fs.pipe_file(f"{folder}/taken", b"first", mode="create", chunksize=100)
    with pytest.raises(OSError) as refused:
        fs.pipe_file(f"{folder}/taken", b"second", mode="create", chunksize=100)
    response = getattr(refused.value.__cause__, "response", {})
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    assert isinstance(refused.value, FileExistsError) or status == 412
    assert fs.cat_file(f"{folder}/taken") == b"first"
    fs.pipe_file(f"{folder}/taken", b"third")
    assert fs.cat_file(f"{folder}/taken") == b"third", "which is why records are not made by a plain write"


def test_s3_shows_a_new_object_in_the_next_listing(bucket: tuple[Any, str]) -> None:
    """Listings are strongly consistent, and s3fs asks the server when it is told to refresh."""
    fs, folder = bucket
    for number in range(20):
        fs.pipe_file(f"{folder}/list/{number}", b"")
        assert f"{folder}/list/{number}" in fs.ls(f"{folder}/list", detail=False, refresh=True)


def test_a_removal_of_what_is_gone_is_no_error_and_removes_what_came_since(bucket: tuple[Any, str]) -> None:
    """S3 deletes by name: a removal that is sent again takes a new object of that name, so numbers are never removed for reuse."""
    fs, folder = bucket
    fs.pipe_file(f"{folder}/gone", b"1")
    fs.rm_file(f"{folder}/gone")
    fs.rm_file(f"{folder}/gone")
    fs.pipe_file(f"{folder}/gone", b"2")
    fs.rm_file(f"{folder}/gone")
    assert not fs.exists(f"{folder}/gone")


def test_the_system_names_a_full_disk() -> None:
    """A full disk is ENOSPC, as `/dev/full` says it."""

    file = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(OSError) as full:
        os.write(file, b"x")
    os.close(file)
    assert full.value.errno == errno.ENOSPC
