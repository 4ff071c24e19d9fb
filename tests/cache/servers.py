"""A real S3 over HTTP (moto, or one that is given), and a proxy before it that misbehaves on purpose."""

from __future__ import annotations

import contextlib
import http.client
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from raysvc.cache.store.fsspec_store import FsspecStore
from raysvc.cache.store.open import open_store

BUCKET = "raysvc-tests"
CODES = {
    403: "AccessDenied",
    429: "TooManyRequests",
    500: "InternalError",
    501: "NotImplemented",
    503: "SlowDown",
}


@dataclass
class S3:
    """An S3 endpoint.

    Attributes:
        url: endpoint.
        proxy: how the proxy misbehaves, None without one.
        key, secret: of a user who may make the bucket.
    """

    url: str
    proxy: Misbehaviour | None = None
    key: str = "test"
    secret: str = "test"

    @property
    def options(self) -> dict[str, str]:
        return {"key": self.key, "secret": self.secret, "endpoint_url": self.url}

    @property
    def checks_signatures(self) -> bool:
        """moto does not."""
        return self.key != "test"

    def store(self, name: str = "", bucket: str = BUCKET, **options: bool) -> FsspecStore:
        """A store in a folder of its own."""
        root = f"s3://{bucket}/{name}{uuid.uuid4().hex}"
        store = open_store(root, self.options, **options)
        assert isinstance(store, FsspecStore)
        return store


@dataclass
class Misbehaviour:
    """What the proxy does to requests whose path holds `only`; each counter goes down by one per request.

    Attributes:
        fail: answers with `status`.
        cut: breaks the connection in the middle of the answer.
        lose: hands the request on and loses the answer: 500.
        flip: flips a bit of the answer's body.
        drop_headers: request headers that never arrive.
    """

    only: str = ""
    method: str = ""
    status: int = 503
    fail: int = 0
    cut: int = 0
    lose: int = 0
    flip: int = 0
    drop_headers: tuple[str, ...] = ()
    seen: list[str] = field(default_factory=list)

    def take(self, what: str, method: str, path: str) -> bool:
        count = getattr(self, what)
        if count and self.only in path and self.method in ("", method):
            setattr(self, what, count - 1)
            return True
        return False


MOTO = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@contextmanager
def moto_server() -> Iterator[S3]:
    """moto on a port that it takes itself, with one bucket; ends with this process."""
    command = [sys.executable, "-c", MOTO]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert server.stdout is not None
    try:
        s3 = S3(f"http://127.0.0.1:{int(server.stdout.readline())}")
        s3.store()._fs().mkdir(BUCKET)
        yield s3
    finally:
        server.kill()
        server.wait()


def given_server() -> S3 | None:
    """The endpoint in RAYSVC_TEST_S3, with the usual AWS variables; None when there is none."""
    url = os.environ.get("RAYSVC_TEST_S3")
    if not url:
        return None
    server = S3(url, None, os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])
    with contextlib.suppress(FileExistsError):
        server.store()._fs().mkdir(BUCKET)
    return server


@contextmanager
def proxy(upstream: S3, **how: object) -> Iterator[S3]:
    """An endpoint before another one that misbehaves as told."""
    misbehaviour = Misbehaviour(**how)
    handler = type("Handler", (_Handler,), {"how": misbehaviour, "upstream": upstream.url.partition("//")[2]})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield S3(f"http://127.0.0.1:{server.server_port}", misbehaviour, upstream.key, upstream.secret)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    how: Misbehaviour
    upstream: str
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.how.seen.append(f"{self.command} {self.path}")
        if self.how.take("fail", self.command, self.path):
            code = CODES[self.how.status]
            return self._answer(self.how.status, {}, b"<Error><Code>%s</Code></Error>" % code.encode())
        dropped = {name.lower() for name in self.how.drop_headers}
        headers = {name: value for name, value in self.headers.items() if name.lower() not in dropped}
        connection = http.client.HTTPConnection(self.upstream, timeout=100)
        connection.request(self.command, self.path, body, headers)
        response = connection.getresponse()
        data = response.read()
        connection.close()
        if self.how.take("lose", self.command, self.path):
            return self._answer(500, {}, b"<Error><Code>InternalError</Code></Error>")
        if len(data) > 100 and self.how.take("flip", self.command, self.path):
            data = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
        return self._answer(response.status, dict(response.headers), data)

    def _answer(self, status: int, headers: dict[str, str], data: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding", "date", "server"):
                self.send_header(name, value)
        size = int(headers.get("Content-Length", len(data))) if self.command == "HEAD" else len(data)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        if self.how.take("cut", self.command, self.path):
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
        else:
            self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on  # noqa: N815
