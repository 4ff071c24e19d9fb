"""Reads a file from a web server that a row names.

Always true:
- each redirect is decided like the URL of the row;
- the address is decided on after the name is resolved, and that address is the one that is connected to;
- headers of the source's options go to the source's own server alone; no proxy and no password file is used;
- a read ends after `DEADLINE_S`, however slowly a server sends.
"""

from __future__ import annotations

import http.client
import socket
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from raysvc.media.reference import AllowedPlaces, NotAllowed

TIMEOUT_S = 30.0  # of a connection, and of a server that sends nothing
DEADLINE_S = 300.0
CHUNK = 1 << 20


def read_web_file(url: str, most: int, places: AllowedPlaces, options: dict[str, Any]) -> bytes:
    """The bytes of a file, one more than `most` where it is longer.

    Args:
        url: that the row may name.
        most: bytes.
        places: decide on redirects and addresses.
        options: of the source's store.

    Raises:
        NotAllowed: a redirect or an address that the row may not name.
        OSError: the server does not give it.
    """
    handlers = (_Redirects(places), _http(places), _https(places), urllib.request.ProxyHandler({}))
    headers = {"User-Agent": "raysvc", **(_headers(options) if _is_own(url, places) else {})}
    end_s = time.monotonic() + DEADLINE_S
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.build_opener(*handlers).open(request, timeout=TIMEOUT_S) as answer:
            data = bytearray()
            while len(data) <= most and (chunk := answer.read1(min(CHUNK, most + 1 - len(data)))):
                data += chunk
                if time.monotonic() > end_s:
                    raise OSError(f"the server did not give it in {DEADLINE_S:.0f} s")
            return bytes(data)
    except urllib.error.HTTPError as error:
        raise OSError(f"the server did not give it: status {error.code}") from None
    except urllib.error.URLError as error:
        raise OSError(f"the server did not give it: {error.reason}") from None
    except http.client.HTTPException as error:  # its text may be what the server sent
        raise OSError(f"the server did not give it: {type(error).__name__}") from None


class _Redirects(urllib.request.HTTPRedirectHandler):
    def __init__(self, places: AllowedPlaces) -> None:
        self._places = places

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: str) -> Any:
        """The next request.

        Raises:
            NotAllowed: the row may not name it.
        """
        try:
            self._places.address_of(newurl, str)
        except NotAllowed as error:
            raise NotAllowed(f"its server sends on to {newurl[:100]!r}: {error}") from None
        made = super().redirect_request(req, fp, code, msg, headers, newurl)
        if made is not None and not _is_own(newurl, self._places):
            made.headers = {"User-agent": "raysvc"}
        return made


def _http(places: AllowedPlaces) -> urllib.request.HTTPHandler:
    class Handler(urllib.request.HTTPHandler):
        def http_open(self, req: Any) -> Any:
            return self.do_open(_decided(http.client.HTTPConnection, places), req)

    return Handler()


def _https(places: AllowedPlaces) -> urllib.request.HTTPSHandler:
    class Handler(urllib.request.HTTPSHandler):
        def https_open(self, req: Any) -> Any:
            return self.do_open(_decided(http.client.HTTPSConnection, places), req)

    return Handler()


def _decided(kind: type[http.client.HTTPConnection], places: AllowedPlaces) -> Any:
    """A connection of a kind, to addresses that a row may name."""

    def make(host: str, **given: Any) -> http.client.HTTPConnection:
        made = kind(host, **given)
        made._create_connection = lambda place, timeout, source: _connected(place, timeout, places)  # type: ignore[attr-defined]
        return made

    return make


def _connected(place: tuple[str, int], timeout_s: float, places: AllowedPlaces) -> socket.socket:
    host, port = place
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for *_, address in found:
        if not places.may_connect(host, str(address[0])):
            raise NotAllowed(f"{host} is at {address[0]}, which is no public address")
    last: OSError | None = None
    for *_, address in found:
        try:
            return socket.create_connection((str(address[0]), port), timeout_s)
        except OSError as error:
            last = error
    raise last or OSError(f"{host} has no address")


def _is_own(url: str, places: AllowedPlaces) -> bool:
    a, b = urlsplit(url), urlsplit(places.folder)
    return (a.scheme, a.netloc) == (b.scheme, b.netloc)


def _headers(options: dict[str, Any]) -> dict[str, str]:
    return {**options.get("headers", {}), **options.get("client_kwargs", {}).get("headers", {})}
