"""What a row may name: hostile references, where they lead, and what is said of them."""

from __future__ import annotations

import http.server
import json
import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from raysvc.job.config import SourceConfig
from raysvc.media.reference import AllowedPlaces, NotAllowed, checked_allow, is_public
from raysvc.pipelines.reading import web_file
from raysvc.pipelines.reading.media_files import read_media_file

from .families import qwen
from .rows import data_url, jpeg, openai
from .test_media_build import build

PHOTO = jpeg(60, 44)
SECRET = b"hush-5f1e77 and more"
WEB = AllowedPlaces(
    "/data/rows", ("images.example.com", "s3://bucket/photos", "https://cdn.example.com:8443/a")
)
REFUSED_URLS = (
    "http://127.0.0.1/a.jpg",
    "http://169.254.169.254/latest/meta-data",
    "http://images.example.com.evil.org/a.jpg",
    "http://evil.org/images.example.com/a.jpg",
    "http://images.example.com@evil.org/a.jpg",
    "http://user:pass@images.example.com/a.jpg",
    "http://images.example.com:8080/a.jpg",
    "http://images.example.com\\@evil.org/a.jpg",
    "http://images.example.com/a b.jpg",
    "https://cdn.example.com/a/b.jpg",
    "https://cdn.example.com:8443/ab.jpg",
    "https://cdn.example.com:8443/a/../b.jpg",
    "https://cdn.example.com:8443/a/%2e%2e/b.jpg",
    "https://cdn.example.com:8443/a/%2E%2E%2Fb.jpg",
    "ftp://images.example.com/a.jpg",
    "s3://bucket/other/a.jpg",
    "s3://bucket/photos/../other/a.jpg",
    "s3://bucket2/photos/a.jpg",
    "simplecache::http://images.example.com/a.jpg",
    "zip://a.jpg::http://images.example.com/a.zip",
    "zip://a.jpg::s3://bucket/photos/a.zip",
    "github://org:repo@/a.jpg",
    "memory://a.jpg",
    "http://[::1]/a.jpg",
    "http://images.example.com:99999/a.jpg",
    "file://etc/passwd",
)


@pytest.mark.parametrize("url", REFUSED_URLS)
def test_a_url_that_the_job_does_not_allow_is_refused(url: str) -> None:
    with pytest.raises(NotAllowed):
        WEB.address_of(url, str)


@pytest.mark.parametrize(
    ("url", "opened"),
    [
        ("http://images.example.com/a.jpg", None),
        ("https://images.example.com:443/a/b.jpg?size=2", None),
        ("HTTPS://Images.Example.com/a.jpg", "https://Images.Example.com/a.jpg"),
        ("s3://bucket/photos/a.jpg", None),
        ("https://cdn.example.com:8443/a/b.jpg", None),
    ],
)
def test_a_url_that_the_job_allows_is_opened_as_it_is(url: str, opened: str | None) -> None:
    assert WEB.address_of(url, str) == (opened or url)


@given(st.text(st.sampled_from("abz./\\:%@#?0 "), max_size=30))
def test_no_other_host_is_reached_however_a_reference_is_written(rest: str) -> None:
    """Held against what the standard library's client would connect to."""
    import urllib.request

    for url in (f"http://{rest}", f"http://images.example.com{rest}"):
        try:
            found = AllowedPlaces("", ("images.example.com",)).address_of(url, str)
        except NotAllowed:
            continue
        host = urllib.request.Request(found).host
        assert host.lower().removesuffix("80").removesuffix(":") == "images.example.com", url


def test_files_of_its_folder_may_be_named_and_others_by_no_way(tmp_path: Path) -> None:
    own, other = tmp_path / "rows", tmp_path / "rows2"
    for folder in (own / "deep", other):
        folder.mkdir(parents=True)
    (own / "a.jpg").write_bytes(PHOTO)
    (other / "b.jpg").write_bytes(SECRET)
    (own / "link.jpg").symlink_to(other / "b.jpg")
    (own / "away").symlink_to(other)
    (own / "same.jpg").symlink_to("a.jpg")
    os.mkfifo(own / "pipe")

    def read(name: str, *allow: str) -> bytes:
        return read_media_file(name, AllowedPlaces(str(own), allow), 1 << 20, {})

    for name in ("a.jpg", "./a.jpg", "deep/../a.jpg", "same.jpg", str(own / "a.jpg"), f"file://{own}/a.jpg"):
        assert read(name) == PHOTO, name
    away = ("../rows2/b.jpg", "link.jpg", "away/b.jpg", str(other / "b.jpg"), f"file://{other}/b.jpg")
    for name in (*away, f"FILE://{other}/b.jpg", f"{own}/../rows2/b.jpg", "deep/../../rows2/b.jpg"):
        with pytest.raises(NotAllowed):
            read(name)
        assert read(name, str(other)) == SECRET, "the job allows it"
    for name in ("/etc/passwd", "/proc/self/environ", "/dev/fd/0", "a\0.jpg"):
        with pytest.raises(NotAllowed):
            read(name)
    for name in ("pipe", "deep"):
        with pytest.raises(OSError, match=r"regular file|directory"):
            read(name)
    with pytest.raises(FileNotFoundError):
        read("gone.jpg")
    with pytest.raises(NotAllowed, match="in no file"):
        read_media_file("a.jpg", AllowedPlaces(""), 9, {})


def test_a_job_allows_only_what_can_be_understood() -> None:
    good = (
        "images.example.com",
        "localhost:8080",
        "s3://bucket",
        "https://a.org/b",
        "/data/images",
        "10.0.0.5",
    )
    assert checked_allow(good) == good
    for bad in (
        "",
        "/",
        "/proc",
        "/proc/1",
        "a/b",
        "../x",
        "/a/../etc",
        "zip://a::s3://b",
        "ftp://a",
        "*",
        "http://u:p@a",
    ):
        with pytest.raises(ValueError, match=r".+"):
            checked_allow([bad])
    assert SourceConfig(path=("a",), media={"allow": ["b.org"]}).media_allow == ("b.org",)
    assert SourceConfig(path=("a",), media=("image",)).media_allow == ()
    with pytest.raises(ValidationError, match="absolute folder"):
        SourceConfig(path=("a",), media={"allow": ["a/b"]})


@pytest.mark.parametrize(
    ("address", "public"),
    [
        *[(one, True) for one in ("8.8.8.8", "2001:4860:4860::8888", "64:ff9b::808:808")],
        *[(one, False) for one in ("127.0.0.1", "10.1.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0")],
        *[(one, False) for one in ("224.0.0.1", "::1", "fe80::1%eth0", "::ffff:10.0.0.1", "64:ff9b::a00:1")],
        *[(one, False) for one in ("2002:0a00:0001::1", "fd00::1", "::", "ff0e::1", "nothing")],
    ],
)
def test_an_address_is_public_or_not(address: str, public: bool) -> None:
    assert is_public(address) is public


class Answers(http.server.BaseHTTPRequestHandler):
    """Gives a photo, and sends on from `/to/URL`."""

    def do_GET(self) -> None:
        self.server.seen.append((self.path, self.headers.get("Authorization")))  # type: ignore[attr-defined]
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path[4:])
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if self.path == "/no":
            self.send_error(403, SECRET.decode())
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(PHOTO)))
        self.end_headers()
        self.wfile.write(PHOTO)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[http.server.ThreadingHTTPServer]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as made:
        made.seen = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=partial(made.serve_forever, 0.01))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def test_a_server_is_asked_only_where_the_job_names_its_address(server: Any) -> None:
    port = server.server_address[1]
    own = f"http://127.0.0.1:{port}"

    def read(url: str, *allow: str, folder: str = "") -> bytes:
        return read_media_file(
            url, AllowedPlaces(folder, allow), 1 << 20, {"headers": {"Authorization": "mine"}}
        )

    assert read(f"{own}/a.jpg", f"127.0.0.1:{port}") == PHOTO
    assert read(f"{own}/a.jpg", own) == PHOTO
    assert {word for _, word in server.seen} == {None}, "options go to the source's own server alone"
    assert read("a.jpg", folder=f"{own}/rows") == PHOTO
    assert server.seen[-1] == ("/rows/a.jpg", "mine")
    server.seen.clear()
    with pytest.raises(NotAllowed, match="no public address"):
        read(f"http://localhost:{port}/a.jpg", f"localhost:{port}")
    with pytest.raises(NotAllowed):
        read(f"{own}/a.jpg")
    assert not server.seen, "nothing was asked"


def test_a_redirect_is_decided_like_the_url_of_a_row(server: Any) -> None:
    port = server.server_address[1]
    own, allow = f"http://127.0.0.1:{port}", (f"127.0.0.1:{server.server_address[1]}", f"localhost:{port}")
    read = partial(read_media_file, places=AllowedPlaces("", allow), most=1 << 20, options={})
    assert read(f"{own}/to/{own}/a.jpg") == PHOTO
    for target in (
        "http://169.254.169.254/x",
        "file:///etc/passwd",
        "ftp://a.org/x",
        f"http://localhost:{port}/a.jpg",
    ):
        with pytest.raises((NotAllowed, OSError), match=r"sends on|302|no public"):
            read(f"{own}/to/{target}")
    assert all(path.startswith("/to/") or path == "/a.jpg" for path, _ in server.seen)
    assert len(server.seen) == 6, "no redirect that is refused was followed"
    with pytest.raises(OSError, match="status 403") as caught:
        read(f"{own}/no")
    assert SECRET.decode() not in str(caught.value)


def test_a_name_that_stands_for_a_private_address_is_not_asked(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = server.server_address
    real = web_file.socket.getaddrinfo
    monkeypatch.setattr(web_file.socket, "getaddrinfo", lambda *_, **given: real(*place, **given))
    with pytest.raises(NotAllowed, match="no public address"):
        read_media_file("http://images.example.com/a.jpg", AllowedPlaces("", ("images.example.com",)), 9, {})
    assert not server.seen


def test_a_refused_file_leaves_no_byte_in_the_report_of_an_entry(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "text.jpg").write_bytes(SECRET)
    (tmp_path / "rows" / "link.jpg").symlink_to(secret)
    names = [str(secret), f"file://{secret}", "../secret", "link.jpg", "text.jpg", "http://127.0.0.1:9/a"]
    rows = [openai([data_url(PHOTO)]), *(openai([name]) for name in names), openai([data_url(PHOTO)])]
    entry = build(tmp_path, qwen(tmp_path / "qwen"), rows, max_quarantine=1.0)
    counts = entry.report["row_counts"]["quarantined"]
    assert counts["an image may not be named by a row"] == 5
    assert sum(counts.values()) == 6
    told = json.dumps(entry.report)
    assert "hush" not in told
    assert "source.media: {allow" in told


def test_what_the_job_allows_is_part_of_the_key(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.jpg").write_bytes(PHOTO)
    rows = [openai([data_url(PHOTO)]), openai([str(tmp_path / "pictures" / "a.jpg")])]
    folder = qwen(tmp_path / "qwen")
    without = build(tmp_path, folder, rows, max_quarantine=1.0)
    allowed = build(tmp_path, folder, rows, source={"media": {"allow": [str(tmp_path / "pictures")]}})
    assert (without.num_rows, allowed.num_rows) == (1, 2)
