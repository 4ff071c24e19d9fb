"""A stand-in for Google Cloud Storage: as much of its JSON API as a store needs, with generation preconditions."""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

Objects = dict[str, tuple[bytes, str]]  # name -> content and time


@contextmanager
def gcs_server() -> Iterator[str]:
    """The endpoint of a server with one bucket."""
    handler = type("Handler", (_Handler,), {"objects": {}, "lock": threading.Lock()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    objects: Objects
    lock: threading.Lock  # guards objects
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        words = {name: values[0] for name, values in parse_qs(url.query).items()}
        name = _object(url.path)
        with self.lock:
            objects = dict(self.objects)
        if not name:
            return self._json(200, _listing(objects, words.get("prefix", ""), words.get("delimiter")))
        if name not in objects:
            return self._json(404, {"error": {"code": 404, "message": "no such object"}})
        if words.get("alt") != "media":
            return self._json(200, _info(name, *objects[name]))
        data = objects[name][0]
        if (asked := self.headers.get("Range")) is None:
            return self._answer(200, data)
        begin, _, end = asked.removeprefix("bytes=").partition("-")
        return self._answer(206, data[int(begin) : int(end) + 1 if end else None])

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        about, content = body.split(b"\n\n", 1)[1].split(b"\n--==0==", 1)
        name = json.loads(about)["name"]
        data = content.split(b"\n\n", 1)[1].removesuffix(b"\n--==0==--")
        once = parse_qs(urlsplit(self.path).query).get("ifGenerationMatch") == ["0"]
        with self.lock:
            if once and name in self.objects:
                return self._json(412, {"error": {"code": 412, "message": "conditionNotMet"}})
            self.objects[name] = data, datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            return self._json(200, _info(name, *self.objects[name]))

    def do_DELETE(self) -> None:
        with self.lock:
            there = self.objects.pop(_object(urlsplit(self.path).path), None)
        if there is None:
            return self._json(404, {"error": {"code": 404, "message": "no such object"}})
        return self._answer(204, b"")

    def _json(self, status: int, value: object) -> None:
        self._answer(status, json.dumps(value).encode())

    def _answer(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _object(path: str) -> str:
    return unquote(path.partition("/o/")[2])


def _info(name: str, data: bytes, time: str) -> dict[str, str]:
    return {"bucket": "bucket", "name": name, "size": str(len(data)), "updated": time, "etag": time}


def _listing(objects: Objects, prefix: str, delimiter: str | None) -> dict[str, object]:
    found = {name: value for name, value in sorted(objects.items()) if name.startswith(prefix)}
    deeper = {name for name in found if delimiter and delimiter in name[len(prefix) :]}
    folders = {prefix + name[len(prefix) :].partition("/")[0] + "/" for name in deeper}
    items = [_info(name, *value) for name, value in found.items() if name not in deeper]
    return {"kind": "storage#objects", "items": items, "prefixes": sorted(folders)}
