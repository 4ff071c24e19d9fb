"""One contract for every store, and what each refuses."""

from __future__ import annotations

import errno
import io
import os
import pickle
import stat
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from botocore.exceptions import ConnectTimeoutError, EndpointConnectionError

from raysvc.cache.store import fsspec_store, posix, retry
from raysvc.cache.store.fsspec_store import FsspecStore
from raysvc.cache.store.open import open_store
from raysvc.cache.store.posix import PosixStore
from raysvc.cache.store.retry import first_answer, retried
from raysvc.cache.store.store import Store, probe_create
from raysvc.errors import StoreError

from .helpers import KEY, build
from .servers import S3, given_server, proxy
from .stand_ins import ForgetfulLink, NfsClient, NoLinks, StaleHandles


class StoreContract:
    """What `raysvc.cache.store.store` promises; `store` is a fixture of each subclass."""

    def test_what_was_written_is_listed_and_read(self, store: Store):
        store.write("entry/a", b"0123456789")
        store.write("entry/b", memoryview(b""))
        store.write("c", b"root")
        assert tuple(store.list("entry")) == ("a", "b")
        assert [(item.name, item.size, item.is_folder) for item in store.scan("entry")] == [
            ("a", 10, False),
            ("b", 0, False),
        ]
        assert {(item.name, item.is_folder) for item in store.scan()} >= {("c", False), ("entry", True)}
        assert store.read("entry/a") == b"0123456789"
        assert store.read("entry/a", 2, 5) == b"234"
        assert store.read("entry/a", 7) == b"789"
        target = io.BytesIO()
        store.download("entry/a", target)
        assert target.getvalue() == b"0123456789"

    def test_what_is_not_there_is_no_error_for_listings_and_one_for_reads(self, store: Store):
        assert tuple(store.list("nothing")) == ()
        assert tuple(store.scan("nothing")) == ()
        store.delete("nothing/file")
        for read in (
            lambda: store.read("nothing/file"),
            lambda: store.download("nothing/file", io.BytesIO()),
        ):
            with pytest.raises(FileNotFoundError):
                read()

    def test_a_name_is_created_once(self, store: Store):
        assert store.create("entry/manifest.json", b"first")
        assert not store.create("entry/manifest.json", b"second")
        assert store.read("entry/manifest.json") == b"first"
        assert tuple(store.list("entry")) == ("manifest.json",)

    def test_of_eight_rivals_exactly_one_creates_a_name(self, store: Store):
        for round_ in range(4):
            wins: list[int] = []
            start = threading.Barrier(8)

            def rival(index: int, name: str, start=start, wins=wins) -> None:
                start.wait()
                if store.create(name, b"%d" % index):
                    wins.append(index)

            threads = [threading.Thread(target=rival, args=(i, f"race/{round_}")) for i in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(wins) == 1
            assert store.read(f"race/{round_}") == b"%d" % wins[0]

    def test_what_was_deleted_is_gone(self, store: Store):
        store.write("entry/a", b"1")
        store.delete("entry/a")
        store.delete("entry/a")
        store.delete("entry")
        assert tuple(store.list("entry")) == ()
        assert "entry" not in store.list()

    def test_a_folder_that_holds_something_is_not_deleted(self, store: Store):
        store.write("entry/a", b"1")
        store.delete("entry")
        assert tuple(store.list("entry")) == ("a",)

    def test_times_are_of_one_clock_and_do_not_go_back(self, store: Store):
        store.write("entry/a", b"1")
        store.write("entry/b", b"1")
        a, b = (item.modified_s for item in store.scan("entry"))
        assert 0 < a <= b < a + 60

    def test_it_survives_pickling(self, store: Store):
        store.write("entry/a", b"1")
        other = pickle.loads(pickle.dumps(store))
        assert other.url == store.url
        assert other.read("entry/a") == b"1"

    def test_the_probe_accepts_it_and_leaves_nothing(self, store: Store):
        probe_create(store)
        store.probe()
        assert tuple(store.list()) == ()

    def test_a_whole_entry_is_built_and_read(self, store: Store):
        from raysvc.cache.find import find_entry

        assert find_entry(store, KEY) is None
        manifest = build(store)
        entry = find_entry(store, KEY)
        assert entry is not None
        assert entry.manifest == manifest
        assert entry.table().num_rows == 12
        assert entry.verify() == []


class TestPosix(StoreContract):
    @pytest.fixture
    def store(self, tmp_path) -> Store:
        return open_store(str(tmp_path / "not" / "yet" / "there"))


class TestFileUrl(StoreContract):
    @pytest.fixture
    def store(self, tmp_path) -> Store:
        return open_store(f"file://{tmp_path}/cache")


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return open_store(f"memory://{uuid.uuid4().hex}/cache")

    def test_a_folder_is_listed_while_another_thread_deletes_in_it(self, store: Store, quick_switches: None):
        for number in range(2000):
            store.write(f"entry/{number:04d}", b"")
        other = threading.Thread(
            target=lambda: [store.delete(f"entry/{number:04d}") for number in range(2000)]
        )
        other.start()
        while other.is_alive():
            store.scan("entry")
        other.join()
        assert tuple(store.list("entry")) == ()

    @pytest.fixture
    def quick_switches(self) -> Iterator[None]:
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        yield
        sys.setswitchinterval(before)


class TestS3(StoreContract):
    @pytest.fixture
    def store(self, s3: S3) -> Store:
        return s3.store("contract-")


class TestGivenS3(StoreContract):
    """A server that checks signatures; `make test-s3` runs everything else on it too."""

    @pytest.fixture
    def given(self, s3: S3) -> S3:
        if given_server() is None:
            pytest.skip("another S3 than moto: set RAYSVC_TEST_S3 and the AWS keys, and run make test-s3")
        return s3

    @pytest.fixture
    def store(self, given: S3) -> Store:
        return given.store("given-")

    def test_wrong_keys_are_a_clear_error(self, given: S3):
        for wrong in (S3(given.url, None, given.key, "wrong"), S3(given.url, None, "nobody", "wrong")):
            store = wrong.store()
            for call in [*_calls(store), store.probe]:
                with pytest.raises(StoreError, match=r"access is refused.*AWS_ACCESS_KEY_ID"):
                    call()


class TestGcs(StoreContract):
    """gcsfs against a stand-in for the server."""

    @pytest.fixture
    def store(self, gcs: str, monkeypatch: pytest.MonkeyPatch) -> Store:
        monkeypatch.setenv(
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false"
        )  # before the import: it would ask over gRPC
        pytest.importorskip("gcsfs")
        return open_store(f"gs://bucket/{uuid.uuid4().hex}", {"endpoint_url": gcs, "token": "anon"})


class TestNfs(StoreContract):
    @pytest.fixture
    def store(self, tmp_path) -> Store:
        return NfsClient(str(tmp_path / "export"))


class TestStaleHandles(StoreContract):
    @pytest.fixture
    def store(self, tmp_path) -> Store:
        return StaleHandles(str(tmp_path / "export"))


class TestNfs30s:
    """The 30 seconds for which a name that was once missing stays missing."""

    @pytest.fixture
    def now(self) -> list[float]:
        return [1000.0]

    @pytest.fixture
    def clients(self, tmp_path, now) -> tuple[NfsClient, NfsClient]:
        return tuple(NfsClient(str(tmp_path / "export"), clock=lambda: now[0]) for _ in range(2))

    def test_the_stand_in_shows_the_effect(self, clients, now):
        a, b = clients
        a.write("entry/other", b"1")
        with pytest.raises(FileNotFoundError):
            b._open(b._path("entry/name"))
        a.write("entry/name", b"1")
        now[0] += 29
        with pytest.raises(FileNotFoundError):
            b._open(b._path("entry/name"))
        now[0] += 2
        b._open(b._path("entry/name")).close()

    def test_a_waiter_sees_the_commit_at_its_next_look(self, clients):
        from raysvc.cache.find import find_entry

        a, b = clients
        assert find_entry(b, KEY) is None
        assert b.list(KEY) == ()
        with pytest.raises(FileNotFoundError):
            b.read(f"{KEY}/manifest.json")
        build(a)
        assert find_entry(b, KEY).num_rows == 12

    def test_a_root_that_was_missing_is_listed_as_soon_as_it_is_there(self, clients):
        a, b = clients
        assert b.scan() == b.list() == ()
        a.write("entry/name", b"1")
        assert [item.name for item in b.scan()] == ["entry"]

    def test_parts_can_be_mapped_at_once(self, clients):
        from raysvc.cache.find import find_entry

        a, b = clients
        manifest = build(a)
        b._scandir(b.root)
        entry = find_entry(b, KEY)
        assert entry.table().num_rows == manifest.num_rows

    def test_readers_never_look_a_name_up_that_no_listing_showed(self, clients):
        from raysvc.cache.find import find_entry

        a, b = clients
        a.write("other/file", b"1")
        find_entry(b, KEY)
        assert b.scan(KEY) == ()
        a.write(f"{KEY}/receipt", b"1")
        find_entry(b, KEY)
        assert [name for name in b.in_vain if KEY in name] == []


class TestPosixDetails:
    def test_a_repeated_link_request_counts_as_won(self, tmp_path):
        store = ForgetfulLink(str(tmp_path))
        assert store.create("a", b"1")
        assert store.read("a") == b"1"

    def test_a_file_system_without_links_is_refused_unless_told(self, tmp_path):
        with pytest.raises(StoreError, match=r"hard links.*unsafe_store"):
            NoLinks(str(tmp_path)).probe()
        assert list(tmp_path.iterdir()) == []
        store = NoLinks(str(tmp_path), unsafe_store=True)
        store.probe()
        assert store.create("a", b"1")
        assert not store.create("a", b"2")
        assert store.read("a") == b"1"

    def test_a_root_that_is_a_file_is_refused_with_its_name(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(StoreError, match=r"file.*cannot be written.*choose another cache\.root"):
            open_store(str(tmp_path / "file")).probe()

    def test_a_part_name_that_is_taken_is_an_error(self, tmp_path):
        store = open_store(str(tmp_path))
        store.write("a", b"1")
        with pytest.raises(FileExistsError):
            store.write("a", b"2")
        assert sorted(item.name for item in tmp_path.iterdir()) == ["a"]

    def test_a_relative_root_is_made_absolute(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert open_store("cache").url == str(tmp_path / "cache")


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


class TestFailingDisk:
    """What the operating system refuses is one line with a remedy, or comes as it is."""

    @pytest.mark.parametrize(
        ("call", "number", "error", "words"),
        [
            ("link", errno.EIO, OSError, "Input/output"),
            ("link", errno.ENOSPC, StoreError, r"No space.*make room"),
            ("link", errno.EACCES, StoreError, r"cannot be written.*choose another"),
            ("link", errno.ENOENT, StoreError, "is deleted again and again"),
            ("mkdir", errno.EROFS, StoreError, "Read-only"),
        ],
    )
    def test_a_write_that_fails_leaves_nothing(self, tmp_path, monkeypatch, call, number, error, words):
        store = open_store(str(tmp_path))
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing(number))
            with pytest.raises(error, match=words):
                store.create("a/b" if call == "mkdir" else "a", b"1")
        assert list(tmp_path.iterdir()) == []
        assert store.create("a", b"1")

    def test_a_folder_that_vanishes_again_and_again_is_named(self, tmp_path, monkeypatch):
        store = open_store(str(tmp_path / "cache"))
        monkeypatch.setattr(PosixStore, "_stage", failing(errno.ENOENT))
        with pytest.raises(StoreError, match="is deleted again and again"):
            store.create("a", b"1")

    @pytest.mark.parametrize(("name", "call"), [("a", "unlink"), ("folder", "rmdir")])
    @pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EIO])
    def test_what_cannot_be_removed_is_named(self, tmp_path, monkeypatch, name, call, number):
        store = open_store(str(tmp_path))
        store.create("a", b"1")
        (tmp_path / "folder").mkdir()
        monkeypatch.setattr(os, call, failing(number))
        with pytest.raises(OSError if number == errno.EIO else StoreError, match=os.strerror(number)):
            store.delete(name)

    @pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
    def test_a_file_system_that_cannot_sync_folders_is_taken_and_a_failing_one_is_not(
        self, tmp_path, monkeypatch, number
    ):
        sync, store = os.fsync, open_store(str(tmp_path))
        monkeypatch.setattr(
            os,
            "fsync",
            lambda handle: failing(number)() if stat.S_ISDIR(os.fstat(handle).st_mode) else sync(handle),
        )
        if number == errno.EIO:
            with pytest.raises(OSError, match="Input/output"):
                store.create("a", b"1")
        else:
            assert store.create("a", b"1")

    def test_a_read_that_fails_comes_as_it_is(self, tmp_path, monkeypatch):
        store = open_store(str(tmp_path))
        store.create("a", b"1")
        monkeypatch.setattr(PosixStore, "_open", failing(errno.EIO))
        with pytest.raises(OSError, match="Input/output"):
            store.read("a")


class Answered(Exception):
    """As botocore's and aiohttp's errors carry what a server said."""

    def __init__(self, response: object, status: object = None) -> None:
        super().__init__("answered")
        self.response, self.status = response, status


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (TimeoutError(), True),
        (ConnectionResetError(), True),
        (OSError(errno.ESTALE, "stale"), True),
        (OSError(errno.EISDIR, "a folder"), False),
        (ValueError(), False),
        (Answered({"ResponseMetadata": {"HTTPStatusCode": 503}}), True),
        (Answered({"ResponseMetadata": {}}, "429"), True),
        (Answered({}, 501), False),
        (Answered(None, 403), False),
        (EndpointConnectionError(endpoint_url="http://gone"), True),
        (ConnectTimeoutError(endpoint_url="http://gone"), True),
    ],
    ids=repr,
)
def test_what_passes_by_itself_is_tried_again_and_nothing_else(error, passes):
    tried = []

    def action() -> str:
        tried.append(1)
        if len(tried) == 1:
            raise error
        return "made"

    if passes:
        assert retried("s3://b", "read", action, sleep=lambda _: None) == "made"
    else:
        with pytest.raises(type(error)):
            retried("s3://b", "read", action, sleep=lambda _: None)
    assert len(tried) == 1 + passes


def test_the_first_answer_may_be_a_refusal():
    def refuse() -> None:
        raise StoreError("s3://b", "no such bucket", "create it")

    with pytest.raises(StoreError, match="no such bucket"):
        first_answer("s3://b", refuse)


def test_a_store_that_nobody_reached_did_not_answer():
    def unreached() -> None:
        raise EndpointConnectionError(endpoint_url="http://gone")

    with pytest.raises(StoreError, match=r"did not answer .*http://gone"):
        first_answer("s3://b", unreached)


class RefusingGcs:
    """What gcsfs does when a generation does not match: an exception that is no OSError."""

    class HttpError(Exception):
        code = 412

    def pipe_file(self, path: str, data: bytes, mode: str, chunksize: int) -> None:
        assert (mode, chunksize > len(data)) == ("create", True)
        raise self.HttpError("conditionNotMet")

    def cat_file(self, path: str, start: None, end: None) -> bytes:
        return b"the winner's"


def test_a_generation_that_does_not_match_is_a_name_that_is_taken(monkeypatch):
    monkeypatch.setattr(FsspecStore, "_fs", lambda self: RefusingGcs())
    assert not open_store("gs://bucket/x").create("manifest.json", b"mine")
    assert open_store("gs://bucket/x").create("manifest.json", b"the winner's")


class TestRemoteDetails:
    """Against a real S3 behind a proxy that misbehaves."""

    @pytest.fixture(autouse=True)
    def short_pauses_in_clients(self, monkeypatch):
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")

    def test_a_store_without_conditional_put_is_refused_unless_told(self, s3: S3):
        if s3.checks_signatures:
            pytest.skip("the header that the proxy drops is signed")
        with proxy(s3, drop_headers=("If-None-Match",)) as bad:
            store = bad.store()
            with pytest.raises(StoreError, match=r"only if it is absent.*cache\.unsafe_store: true"):
                store.probe()
            assert store.list() == ()
            unsafe = FsspecStore(store.url, store.options, unsafe_store=True)
            unsafe.probe()
            assert unsafe.create("a", b"1")
            assert not unsafe.create("a", b"2")
            build(unsafe)

    def test_a_store_that_refuses_conditions_is_refused(self, s3: S3):
        with proxy(s3, fail=100, status=501, method="PUT") as bad:
            with pytest.raises(StoreError, match=r"cache\.unsafe_store"):
                bad.store().probe()

    @pytest.mark.parametrize("status", [500, 503, 429])
    def test_passing_failures_are_tried_again(self, s3: S3, status):
        store = s3.store()
        with proxy(s3) as bad:
            flaky = FsspecStore(store.url, bad.options)
            for call in _calls(flaky):
                bad.proxy.status, bad.proxy.fail = status, 2
                call()
                assert bad.proxy.fail == 0

    def test_a_broken_connection_is_tried_again(self, s3: S3):
        store = s3.store()
        store.write("a", b"x" * 10000)
        with proxy(s3) as bad:
            flaky = FsspecStore(store.url, bad.options)
            bad.proxy.cut = 2
            assert flaky.read("a") == b"x" * 10000
            bad.proxy.cut = 1
            target = io.BytesIO()
            flaky.download("a", target)
            assert target.getvalue() == b"x" * 10000

    def test_the_winner_whose_answer_was_lost_still_won(self, s3: S3):
        store = s3.store()
        with proxy(s3, lose=1, method="PUT") as bad:
            assert FsspecStore(store.url, bad.options).create("a", b"mine")
        assert store.read("a") == b"mine"
        with proxy(s3, lose=1, method="PUT") as bad:
            assert not FsspecStore(store.url, bad.options).create("a", b"other")

    def test_what_another_client_wrote_after_a_listing_is_seen(self, s3: S3):
        store = s3.store()
        store.write("entry/a", b"1")
        with proxy(s3) as other:
            reader = FsspecStore(store.url, other.options)
            assert reader.list("entry") == ("a",)
            store.write("entry/b", b"22")
            assert not reader.create("entry/b", b"mine")
            assert reader.read("entry/b") == b"22"
            assert reader.read("entry/b", 1, 2) == b"2"
            reader.download("entry/b", io.BytesIO())
            assert reader.list("entry") == ("a", "b")

    def test_a_commit_marker_is_one_put_however_large(self, s3: S3):
        store = s3.store()
        with proxy(s3) as seen:
            FsspecStore(store.url, seen.options).create("big", bytes(120 << 20))
            writes = [line for line in seen.proxy.seen if not line.startswith("GET")]
            assert [line.split()[0] for line in writes] == ["PUT"]

    def test_a_store_that_stays_down_is_named_in_the_end(self, s3: S3, monkeypatch):
        monkeypatch.setattr(retry, "ATTEMPTS", 2)
        store = s3.store()
        fsspec_store._answered.add(store.url)
        with proxy(s3, fail=10000, status=500) as bad:
            with pytest.raises(StoreError, match=r"s3://.*failed \d times.*check the network"):
                FsspecStore(store.url, bad.options).read("a")

    def test_a_wrong_bucket_is_a_clear_error(self, s3: S3):
        store = s3.store(bucket="no-such-bucket")
        for call in (lambda: store.list("x"), lambda: store.write("x", b"1"), store.probe):
            with pytest.raises(StoreError, match=r"s3://no-such-bucket.*the bucket is not there"):
                call()

    def test_a_wrong_bucket_is_told_by_a_server_without_words_too(self):
        answer = OSError()
        answer.response = {"Error": {"Code": "NoSuchBucket", "Message": None}}  # radosgw
        missing = FileNotFoundError("None")
        missing.__cause__ = answer

        def attempt() -> None:
            raise missing

        with pytest.raises(StoreError, match=r"s3://x.*the bucket is not there"):
            retry.retried("s3://x", "list", attempt)

    def test_a_missing_file_in_a_bucket_of_that_name_is_a_missing_file(self, s3: S3):
        s3.store()._fs().mkdir("my-bucket")
        store = s3.store(bucket="my-bucket")
        assert tuple(store.list("bucket")) == ()
        store.delete("bucket/file")
        for read in (store.read, lambda name: store.download(name, io.BytesIO())):
            with pytest.raises(FileNotFoundError):
                read("bucket/file")

    def test_refused_credentials_are_a_clear_error(self, s3: S3):
        with proxy(s3, fail=1000, status=403) as bad:
            store = bad.store()
            for call in [*_calls(store), store.probe]:
                with pytest.raises(StoreError, match=r"access is refused.*AWS_ACCESS_KEY_ID"):
                    call()

    def test_an_unknown_scheme_is_a_clear_error(self):
        with pytest.raises(StoreError, match=r"nosuch://.*fix the URL"):
            open_store("nosuch://x/y").list()


def _calls(store: Store) -> list[Callable[[], object]]:
    return [
        lambda: store.write("a", b"1"),
        lambda: store.read("a"),
        lambda: store.list(),
        lambda: store.create(f"c-{uuid.uuid4().hex}", b"1"),
        lambda: store.download("a", io.BytesIO()),
        lambda: store.delete("a"),
    ]


def test_the_default_root_is_the_environment_or_a_folder_here(monkeypatch, tmp_path):
    from raysvc.cache.store.open import default_root

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYSVC_CACHE_DIR", "/data/cache")
    assert default_root() == "/data/cache"
    monkeypatch.setenv("RAYSVC_CACHE_DIR", "")
    assert default_root() == str(tmp_path / ".raysvc/cache")
    assert default_root("mine") == str(tmp_path / "mine")


def test_a_probe_runs_once_per_process_and_root(tmp_path):
    store = PosixStore(str(tmp_path / "once"))
    store.probe()
    (tmp_path / "once").rmdir()
    store.probe()
    assert not (tmp_path / "once").exists()
    assert store.root in posix._probed
    assert fsspec_store._probed.isdisjoint(posix._probed)
