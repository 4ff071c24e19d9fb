"""Runs Python that arrives over TCP, in a guest: one JSON line `{"code"}` in, one `{"result", "error"}` out.

Names stay from one call to the next; what the code leaves in `result` is the answer.
"""

from __future__ import annotations

import json
import socketserver
import sys
import traceback
from typing import Any

NAMES: dict[str, Any] = {}


class Handler(socketserver.StreamRequestHandler):
    """One call."""

    def handle(self) -> None:
        answer: dict[str, Any] = {"result": None, "error": None}
        try:
            names = dict(NAMES)
            exec(json.loads(self.rfile.readline())["code"], names)
            answer["result"] = names.pop("result", None)
            NAMES.update(names)
        except BaseException:  # noqa: BLE001  whatever it is, the test on the other side is told
            answer["error"] = traceback.format_exc()
        self.wfile.write(json.dumps(answer).encode() + b"\n")


class Server(socketserver.ThreadingTCPServer):
    """Calls may run at the same time."""

    allow_reuse_address = True
    daemon_threads = True


if __name__ == "__main__":
    Server((sys.argv[1], 7000), Handler).serve_forever()
