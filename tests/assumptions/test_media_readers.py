"""What we assume of the libraries that read what a row names: `http.client`, `urllib`, `ipaddress`, fsspec and Pillow."""

from __future__ import annotations

import http.client
import io
import ipaddress
import socket
import urllib.request

import fsspec
import pytest
from PIL.PngImagePlugin import ChunkStream


@pytest.mark.parametrize("kind", [http.client.HTTPConnection, http.client.HTTPSConnection])
def test_a_connection_is_made_by_create_connection_alone(kind: type[http.client.HTTPConnection]) -> None:
    """`_create_connection` of a connection gets (host, port), and no other socket is opened."""
    asked: list[object] = []

    def refuse(place: object, *_: object) -> socket.socket:
        asked.append(place)
        raise ConnectionRefusedError

    made = kind("images.example.com", timeout=1)
    assert made._create_connection is socket.create_connection  # type: ignore[attr-defined]
    made._create_connection = refuse  # type: ignore[attr-defined]
    with pytest.raises(ConnectionRefusedError):
        made.request("GET", "/")
    assert asked == [("images.example.com", made.default_port)]


def test_https_checks_the_name_in_the_certificate() -> None:
    """The default context of `HTTPSConnection` checks names: an address that was decided on cannot be another server's."""
    context = http.client.HTTPSConnection("a.org")._context  # type: ignore[attr-defined]
    assert context.check_hostname


def test_a_redirect_goes_through_redirect_request_and_leaves_the_web_never() -> None:
    """`urllib` sends a redirect to `file:` back as an error before it asks a handler."""
    handler = urllib.request.HTTPRedirectHandler()
    handler.parent = urllib.request.build_opener()  # type: ignore[attr-defined]
    headers = http.client.HTTPMessage()
    headers["location"] = "file:///etc/passwd"
    request = urllib.request.Request("http://a.org")
    with pytest.raises(urllib.request.HTTPError, match="not allowed"):
        handler.http_error_302(request, io.BytesIO(), 302, "", headers)


def test_an_ip_address_knows_what_is_not_public() -> None:
    """`is_global` is false of private, loopback, link-local and shared addresses, and true of NAT64's, which we unpack."""
    for address in ("10.0.0.1", "127.0.0.1", "169.254.169.254", "100.64.0.1", "::1", "fe80::1", "fd00::1"):
        assert not ipaddress.ip_address(address).is_global, address
    assert ipaddress.ip_address("64:ff9b::a00:1").is_global


def test_fsspec_chains_protocols_by_two_colons_and_by_nothing_else() -> None:
    """A URL without `::` is opened by the file system of its scheme."""
    from fsspec.core import _un_chain

    assert len(_un_chain("s3://bucket/a?b#c!d|e", {})) == 1
    assert len(_un_chain("simplecache::s3://bucket/a", {})) == 2
    with pytest.raises(ValueError, match="not known"):
        fsspec.core.url_to_fs("nothing://a")


def test_pillow_quotes_bytes_of_a_file_only_behind_a_quotation_mark() -> None:
    """Its message on a broken PNG holds a chunk's name as `b'...'`, which `pixels._why` cuts off."""
    from raysvc.media.pixels import _why

    with pytest.raises(SyntaxError, match="Zz9") as said:
        ChunkStream(io.BytesIO(bytes(4) + b"\x01Zz9")).read()
    assert _why(said.value) == "broken PNG file"
