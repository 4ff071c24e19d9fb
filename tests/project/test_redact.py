"""No secret of a URL is shown, stored or logged."""

from __future__ import annotations

import pytest

from raysvc.errors import SourceError
from raysvc.redact import redacted


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://TOKEN@host/x", "https://***@host/x"),
        ("s3://key:secret@bucket/rows.jsonl", "s3://***@bucket/rows.jsonl"),
        (
            "'https://h/rows.jsonl?X-Sig=abc&e=1' cannot be read",
            "'https://h/rows.jsonl?***' cannot be read",
        ),
        (
            "403, url='https://h/a?sig=abc', and https://h/b?t=1",
            "403, url='https://h/a?***', and https://h/b?***",
        ),
        ("https://u:p@h/a?b=c", "https://***@h/a?***"),
        ("/data/row?.jsonl, a=b@c", "/data/row?.jsonl, a=b@c"),
        ("s3://bucket/row?.jsonl", "s3://bucket/row?.jsonl"),
        ("hf://datasets/owner/name@main/x.jsonl", "hf://datasets/owner/name@main/x.jsonl"),
    ],
)
def test_what_a_url_must_not_tell_is_taken_out(text: str, shown: str) -> None:
    assert redacted(text) == shown


def test_an_error_holds_no_secret_in_its_text_nor_in_its_arguments() -> None:
    error = SourceError("source.path", "'https://me:SECRET@h/x?sig=SECRET' cannot be read", "check it")
    assert "SECRET" not in f"{error} {error!r} {error.args} {vars(error)}"
