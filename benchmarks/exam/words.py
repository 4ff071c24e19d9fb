"""The words of a row, and their ids in the one small vocabulary of the exam: what a loader gives is compared with them.

Always true:
- the second word of a row is its number, and no other word is a number;
- rows whose numbers are less than 256 apart have no other words in common at the same places.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

WORDS = 2000  # numbers that are words
OTHERS = [f"{one}{two}" for one in "abcdefghijklmnop" for two in "abcdefghijklmnop"]
KNOWN = {
    "[UNK]": 0,
    "row": 1,
    **{str(number): number + 2 for number in range(WORDS)},
    "word": WORDS + 2,
    "[PAD]": WORDS + 3,
    **{word: WORDS + 4 + at for at, word in enumerate(OTHERS)},
}


def text_of(row: int) -> str:
    """A row of 2 to 11 words; those after its number no row beside it has."""
    return " ".join(["row", str(row), *(OTHERS[(row + 29 * at) % 256] for at in range((row * 37 + 11) % 10))])


def ids_of(text: str) -> list[int]:
    """Ids of a text, as every tokenizer of the exam makes them."""
    return [KNOWN.get(word, 0) for word in text.split()]


def number_of(ids: Sequence[int]) -> int:
    """The number that ids say; -1: they say none."""
    return ids[1] - 2 if len(ids) > 1 and 2 <= ids[1] < WORDS + 2 else -1


LONG = 16_384  # ids of a row of a stream that is longer than memory: 64 KiB


def row_of(row: int, with_ids: bool = False) -> dict[str, Any]:
    """A row of a source."""
    if not with_ids:
        return {"row": row, "text": f"row {row}" + " word" * (row % 4)}
    ids = ids_of(text_of(row))
    return {"row": row, "input_ids": ids, "loss_mask": [1] * len(ids)}


def write_rows(path: Path, numbers: Sequence[int], with_ids: bool = False) -> None:
    """Write a source, where it is another one; a `.list` names Parquet files of rows of `LONG` ids, whose first two say the number."""
    if path.suffix == ".list":
        return _write_long(path, numbers)
    text = "".join(json.dumps(row_of(row, with_ids)) + "\n" for row in numbers)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return None


def parts_of(path: Path) -> list[str]:
    """The files that a list names."""
    return path.read_text().splitlines()


def _write_long(path: Path, numbers: Sequence[int]) -> None:
    """Eight files, as data sets on a hub are cut."""
    folder = path.with_name(f"parts-{len(numbers)}")
    folder.mkdir()
    size = -(-len(numbers) // 8)
    parts = [folder / f"part-{at}.parquet" for at in range(8)]
    for at, part in enumerate(parts):
        _write_part(part, numbers[at * size : (at + 1) * size])
    path.write_text("".join(f"{part}\n" for part in parts))


def _write_part(path: Path, numbers: Sequence[int]) -> None:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema({"input_ids": pa.list_(pa.int32()), "loss_mask": pa.list_(pa.int8())})
    with pq.ParquetWriter(
        path, schema, use_dictionary=["loss_mask.list.element"], compression="none"
    ) as writer:
        for begin in range(0, len(numbers), 64):
            some = np.array(numbers[begin : begin + 64])[:, None]
            ids = ((some * 7 + np.arange(LONG) * 13) % WORDS).astype(np.int32)
            ids[:, :1], ids[:, 1:2] = some // 1000, some % 1000
            ends = np.arange(len(some) + 1, dtype=np.int32) * LONG
            ones = np.ones(ids.size, np.int8)
            columns = [pa.ListArray.from_arrays(ends, values) for values in (ids.reshape(-1), ones)]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema), row_group_size=64)


def long_number(ids: Any) -> int:
    """The number that the ids of a long row say."""
    return int(ids[0]) * 1000 + int(ids[1])


def cut(ids: Sequence[int], of: Sequence[int]) -> list[list[int]]:
    """Ids of the rows of a line: `of` says for each id which row it belongs to, from 1; 0 is padding."""
    rows: dict[int, list[int]] = {}
    for token, row in zip(ids, of, strict=True):
        if row:
            rows.setdefault(int(row), []).append(int(token))
    return list(rows.values())


def cut_all(ids: Iterable[Sequence[int]], of: Iterable[Sequence[int]]) -> list[list[int]]:
    """The rows of several lines."""
    return [row for line, its in zip(ids, of, strict=True) for row in cut(line, its)]


def pad(some: Sequence[Sequence[int]]) -> dict[str, Any]:
    """What a collate function of a user makes of rows: ids and the attention mask as tensors, padded on the right."""
    import torch

    ids = [torch.tensor(list(map(int, one))) for one in some]
    masks = [torch.ones(len(one), dtype=torch.long) for one in some]
    padded = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": padded(ids, batch_first=True, padding_value=WORDS + 3),
        "attention_mask": padded(masks, batch_first=True),
    }


def unpad(batch: Any) -> list[list[int]]:
    """The rows of such a batch."""
    return cut_all(batch["input_ids"].tolist(), batch["attention_mask"].tolist())


def _backend() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel(KNOWN, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return words


def tokenizer() -> Any:
    """The vocabulary as a tokenizer of transformers."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=_backend(), unk_token="[UNK]", pad_token="[PAD]", eos_token="[PAD]"
    )


def save_tokenizer(folder: Path) -> None:
    """The same in a folder, as AutoTokenizer reads it."""
    folder.mkdir()
    _backend().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "eos_token": "[PAD]", "unk_token": "[UNK]"}'
    )
