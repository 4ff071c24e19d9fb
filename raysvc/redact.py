"""Secrets taken out of URLs before they are shown, stored or logged.

Always true:
- user, password and token before an `@`, and the values behind a `?`, are not in the result;
- text without a URL comes back as it was.
"""

from __future__ import annotations

import re

_USER = re.compile(r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.-]*://)[^/\s'\"@]+@")
_QUERY = re.compile(r"(?P<address>\b[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"?]*)\?[^\s'\",;)\]>]*=[^\s'\",;)\]>]*")


def redacted(text: str) -> str:
    """Any text with its URLs made safe to show.

    Examples:
        >>> redacted("https://token@host/rows.jsonl?sig=abc cannot be read")
        'https://***@host/rows.jsonl?*** cannot be read'
    """
    if "://" not in text:
        return text
    return _QUERY.sub(r"\g<address>?***", _USER.sub(r"\g<scheme>***@", text))
