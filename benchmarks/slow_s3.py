"""An S3 server on this machine whose connections carry so many bytes a second."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1 << 16


@contextmanager
def slow_s3(bytes_per_s: float) -> Iterator[dict[str, str]]:
    """Options of an empty bucket `rows` in moto, behind a relay that slows each connection, in both directions."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server,
        socket.create_server(("127.0.0.1", 0), backlog=128) as door,
    ):
        try:
            _wait_for(port)
            threading.Thread(target=_accept, args=(door, port, bytes_per_s), daemon=True).start()
            yield {
                "key": "test",
                "secret": "test",
                "endpoint_url": f"http://127.0.0.1:{door.getsockname()[1]}",
            }
        finally:
            server.kill()


def upload(rows: Path, files: int, options: dict[str, str]) -> str:
    """The lines of a file in so many objects of about one size; their folder."""
    import s3fs

    fs: Any = s3fs.S3FileSystem(**options)
    fs.mkdir("rows")
    size = rows.stat().st_size
    with rows.open("rb") as file:
        for number in range(files):
            wanted = size * (number + 1) // files - file.tell()
            fs.pipe_file(f"rows/data/part-{number:03d}.jsonl", file.read(wanted) + file.readline())
    return "s3://rows/data/"


def _wait_for(port: int) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise TimeoutError("moto did not start in 60 s")


def _accept(door: socket.socket, port: int, bytes_per_s: float) -> None:
    while True:
        try:
            near, _ = door.accept()
        except OSError:
            return
        far = socket.create_connection(("127.0.0.1", port))
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=_carry, args=(source, target, bytes_per_s), daemon=True).start()


def _carry(source: socket.socket, target: socket.socket, bytes_per_s: float) -> None:
    free_at = time.monotonic()
    with suppress(OSError):
        while data := source.recv(CHUNK_BYTES):
            target.sendall(data)
            free_at = max(free_at, time.monotonic()) + len(data) / bytes_per_s
            time.sleep(max(0.0, free_at - time.monotonic()))
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
