"""The checksums of parts: XXH3-128 of the file and XXH3-64 of each block, for accidents on disks and networks, not against an adversary.

Whoever can change a part can change the manifest that names it, so a cryptographic hash would protect nothing
more, and it is ten times slower than the memory it checks.
"""

from __future__ import annotations

import xxhash

BLOCK = 1 << 18  # bytes; a random row costs the check of its block: 256 KiB take 20 microseconds
DIGITS = 16  # of the checksum of a block


def checksum_of(data: bytes | memoryview) -> str:
    """32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def block_checksum(data: bytes | memoryview) -> str:
    """16 hex digits: XXH3-64."""
    return xxhash.xxh3_64_hexdigest(data)


def block_checksums(data: bytes | memoryview) -> str:
    """Checksums of the blocks of a file, one after the other."""
    view = memoryview(data)
    return "".join(block_checksum(view[at : at + BLOCK]) for at in range(0, len(view), BLOCK))
