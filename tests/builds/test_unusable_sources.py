"""A source without a row that can be used is refused with what is wrong with its rows, and what to do."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from raysvc.errors import SourceError

ROW = json.dumps({"text": "a"})
FILES: dict[str, tuple[bytes, str]] = {
    "utf16.txt": ("a\nb\n".encode("utf-16"), "is text in UTF-16; save it as UTF-8"),
    "utf16.jsonl": (f"{ROW}\n".encode("utf-16"), "is text in UTF-16; save it as UTF-8"),
    "utf16.json": (b"\xfe\xff" + f"[{ROW}]".encode("utf-16-be"), "is text in UTF-16"),
    "packed.jsonl": (gzip.compress(ROW.encode()), "is compressed; add .gz to its name"),
    "list.jsonl": (
        f"[{ROW}]\n".encode(),
        "line 1 of .*/list.jsonl: not a JSON object: it is a list.*ends in .json",
    ),
    "pretty.jsonl": (
        b'{\n"text": "a"\n}\n',
        "line 1 of .*/pretty.jsonl: broken JSON: .*one JSON object per line",
    ),
    "two.jsonl": (f"{ROW} {ROW}\n".encode(), "line 1 of .*/two.jsonl: broken JSON: Extra data"),
    "fields.csv": (
        b"question,answer\na,b,c\n",
        "row 1 of .*/fields.csv: fields and header differ: 3 fields for 2.*commas",
    ),
    "header.csv": (b"question,answer\n", "has no rows; give files with at least one row"),
    "blank.jsonl": (b"\n \n", "holds no row; give files with at least one row"),
    "numbers.jsonl": (
        b'{"text": 5}\n',
        r"no row is left to train on: 'text' is not text \(1 row, e.g. row 0: it is a int\)",
    ),
    "roles.jsonl": (
        b'{"messages": [{"role": "user", "content": "a"}, {"rolle": "assistant"}]}\n',
        r"no row is left to train on: a message has no role \(1 row, e.g. row 0: messages\[1\] has the keys",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_the_error_says_what_is_wrong_with_the_rows(
    name: str, sample: dict[str, str], tmp_path: Path
) -> None:
    import raysvc

    data, said = FILES[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(SourceError, match=said):
        raysvc.tokenize(
            source={"path": str(tmp_path / name)},
            tokenizer=sample["tokenizer"],
            cache={"root": str(tmp_path / "cache")},
            max_quarantine=1.0,
        )
