"""Decides what a row may name as a medium; every reader asks here, and no other place decides it.

Rows are untrusted and the job is trusted. A row may name what lies under one of its places: the folder of its own file, and what
`source.media.allow` has.

| place | what a row may name there |
|---|---|
| `/folder` | files under it, once all links are followed |
| `s3://bucket/prefix`, `https://host/prefix` | what is below, by that protocol and host |
| `host`, `host:port` | what that web server gives |

Always true:
- a path is decided by where it leads, not by how it is written: `..` and links that leave all places are refused;
- `/proc` and `/sys` are in no place;
- protocols that are chained (`zip://a::http://b`), passwords in a URL and `..` in a URL are refused;
- a web server is reached at a public address, unless the job's own words have its address: see `may_connect`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from urllib.parse import SplitResult, unquote, urlsplit

STORES = ("http", "https", "s3", "gs", "gcs", "az", "abfs", "abfss", "hf")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:\d{1,5})?")
_PORTS = {"http": 80, "https": 443}
_NOT_IN_URL = re.compile(r"[\x00-\x20\x7f\\]")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_KERNEL = ("/proc", "/sys")


class NotAllowed(ValueError):
    """A row names what it may not."""


@dataclass(frozen=True)
class AllowedPlaces:
    """Says where the media of a row may lie.

    Attributes:
        folder: of the row's own file, a path or URL; empty where a row is in no file.
        allow: of the job.
    """

    folder: str
    allow: tuple[str, ...] = ()

    def address_of(self, reference: str, resolve: Callable[[str], str]) -> str:
        """The path or URL to open.

        Args:
            reference: as the row has it.
            resolve: follows the links of a path; `os.path.realpath`.

        Raises:
            NotAllowed: the row may not name it.
        """
        full = self._full(reference)
        return self._url(full) if "://" in full else self._path(full, resolve)

    def may_connect(self, host: str, address: str) -> bool:
        """Returns whether a web server may be reached at an address.

        Args:
            host: of the URL.
            address: that its name stands for.
        """
        if is_public(address):
            return True
        own = urlsplit(self.folder).hostname if "://" in self.folder else None
        in_numbers = host == address and any(host == _host_of(place) for place in self.allow)
        return host.lower() == own or in_numbers

    def _full(self, reference: str) -> str:
        if "\0" in reference:
            raise NotAllowed("it has a zero byte")
        scheme, mark, rest = reference.partition("://")
        if mark and scheme.lower() == "file":
            if not rest.startswith("/"):
                raise NotAllowed("a file:// URL has three slashes")
            return rest
        if mark or reference.startswith("/"):
            return reference
        if not self.folder:
            raise NotAllowed(
                "a relative path is relative to the folder of its row's file, and this row is in no file"
            )
        return f"{self.folder}/{reference}"

    def _path(self, path: str, resolve: Callable[[str], str]) -> str:
        real = resolve(path)
        folders = (place for place in (self.folder, *self.allow) if place.startswith("/"))
        if any(_is_under(real, root) for root in _KERNEL) or not any(
            _is_under(real, resolve(root)) for root in folders
        ):
            raise NotAllowed("it lies outside of the folder of the row's file")
        return real

    def _url(self, url: str) -> str:
        split = _split(url)
        named = (place for place in (self.folder, *self.allow) if place[:1] not in ("", "/"))
        if not any(_covers(place, split) for place in named):
            raise NotAllowed("the job allows no media from there")
        return split.geturl()


def checked_allow(places: Iterable[str]) -> tuple[str, ...]:
    """The places of a job, when each can be understood.

    Raises:
        ValueError: one cannot.
    """
    return tuple(_checked(place) for place in places)


def is_public(address: str) -> bool:
    """Returns whether an IP address is one of the public internet, also where it stands for another one."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo or (None, None))[1]
        if found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return found.is_global and not found.is_multicast


def _checked(place: str) -> str:
    if place.startswith("/"):
        if not place.strip("/") or ".." in place.split("/") or any(_is_under(place, one) for one in _KERNEL):
            raise ValueError(f"{place!r} is no folder of media")
        return place
    if "://" in place:
        try:
            scheme = _split(place).scheme
        except NotAllowed as error:
            raise ValueError(f"{place!r}: {error}") from None
        if scheme in STORES:
            return place
    elif _HOST.fullmatch(place):
        return place.lower()
    raise ValueError(
        f"{place!r} is no host (images.example.com), bucket (s3://bucket/prefix) or absolute folder (/data/images)"
    )


def _split(url: str) -> SplitResult:
    """The parts of a URL that says one thing to everybody who reads it.

    Raises:
        NotAllowed: it does not.
    """
    if "::" in url:
        raise NotAllowed("protocols may not be chained")
    if _NOT_IN_URL.search(url):
        raise NotAllowed("a URL may not hold blanks, backslashes or control characters")
    try:
        split = urlsplit(url)
        _ = split.port
    except ValueError:
        raise NotAllowed("it is not a URL") from None
    if "@" in split.netloc:
        raise NotAllowed("a URL may not hold a name or password")
    if ".." in unquote(split.path).replace("\\", "/").split("/"):
        raise NotAllowed("the path of a URL may not hold '..'")
    return split


def _covers(place: str, url: SplitResult) -> bool:
    if "://" not in place:
        host, _, port = place.partition(":")
        wanted = int(port) if port else _PORTS.get(url.scheme)
        own_port = _PORTS.get(url.scheme) if url.port is None else url.port
        return url.scheme in _PORTS and url.hostname == host and own_port == wanted
    own = urlsplit(place)
    same = (own.scheme, own.netloc.lower()) == (url.scheme, url.netloc.lower())
    return same and url.path.startswith(f"{own.path.rstrip('/')}/")


def _host_of(place: str) -> str | None:
    return urlsplit(place).hostname if "://" in place else place.partition(":")[0]


def _is_under(path: str, root: str) -> bool:
    return f"{path}/".startswith(f"{root.rstrip('/')}/") and root.strip("/") != ""
