"""The checksum of parts: XXH3-128, for accidents on disks and networks, not against an adversary.

Whoever can change a part can change the manifest that names it, so a cryptographic hash would protect nothing
more, and it is ten times slower than the memory it checks.
"""

from __future__ import annotations

import xxhash


def checksum_of(data: bytes | memoryview) -> str:
    """32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)
