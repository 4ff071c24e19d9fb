"""Columns that go with their row: typed, laid at their tokens, cut with them; oracle: plain Python lists."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysvc.chat.carry import Carrier, arrow_values, resolved
from raysvc.chat.row_errors import RowFault
from raysvc.chat.select import Kept
from raysvc.chat.source.examples import TokensExample
from raysvc.errors import ConfigError
from raysvc.job.carried import CarriedColumn
from raysvc.job.column_dtypes import BF16, bf16_of
from raysvc.job.config import SourceConfig, TextSpec, TokenizerConfig

CHATML = "chatml_bare"


def written(columns: dict[str, CarriedColumn], row: dict[str, Any], mask: list[int], keep: int) -> Any:
    """What is written of one pretokenized row of which `keep` tokens are left."""
    carrier = Carrier(columns, "pretokenized")
    carrier.take(7, row, TokensExample([0] * len(mask), mask))
    one = np.array([7], np.int64)
    kept = Kept(
        np.zeros(keep, np.int32), np.array(mask[:keep], np.uint8), np.array([keep]), one, 1, len(mask)
    )
    return {name: array.to_pylist()[0] for name, array in carrier.arrays(kept).items()}


def nested(draw: Any, shape: tuple[int, ...]) -> Any:
    if not shape:
        return draw(st.integers(0, 200))
    return [nested(draw, shape[1:]) for _ in range(shape[0])]


@given(st.data())
def test_a_value_per_token_lies_at_the_token_it_is_about_and_is_cut_with_it(data: Any) -> None:
    mask = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=7))
    shape = tuple(data.draw(st.lists(st.integers(1, 3), max_size=2)))
    align = data.draw(st.sampled_from(["this_token", "next_token", "response"]))
    dtype = data.draw(st.sampled_from(["uint8", "int16", "int64", "float32", "float64"]))
    keep = data.draw(st.integers(1, len(mask)))
    pad = data.draw(st.integers(0, 9))
    column = CarriedColumn(dtype=dtype, per="token", shape=shape, pad=pad, align=align)
    count = {"this_token": len(mask), "next_token": len(mask) - 1, "response": sum(mask)}[align]
    values = [nested(data.draw, shape) for _ in range(count)]
    padded: Any = pad
    for size in reversed(shape):
        padded = [padded] * size
    left = iter(values)
    expected = [
        next(left)
        if align == "this_token" or (align == "next_token" and place) or (align == "response" and hit)
        else padded
        for place, hit in enumerate(mask)
    ]
    assert written({"x": column}, {"x": values}, mask, keep)["x"] == expected[:keep]


def test_bytes_as_base64_are_the_same_values() -> None:
    column = CarriedColumn(dtype="uint8", per="token", shape=(2, 3))
    values = np.arange(24, dtype=np.uint8).reshape(4, 2, 3)
    text = base64.b64encode(values.tobytes()).decode()
    plain = written({"x": column}, {"x": values.tolist()}, [0, 1, 1, 1], 3)
    assert written({"x": column}, {"x": text}, [0, 1, 1, 1], 3) == plain == {"x": values[:3].tolist()}


def test_bfloat16_is_what_torch_makes_of_the_same_numbers() -> None:
    torch = pytest.importorskip("torch")
    numbers = np.random.default_rng(0).normal(size=1000).astype(np.float32) * 1e3
    numbers[:4] = [np.inf, -np.inf, 0.0, -0.0]
    truth = torch.from_numpy(numbers).to(torch.bfloat16).view(torch.uint16).numpy()
    assert np.array_equal(bf16_of(numbers)["bfloat16"], truth)
    assert bf16_of(numbers).dtype == BF16


WRONG: list[tuple[dict[str, Any], Any, str]] = [
    ({"dtype": "uint8", "per": "token"}, [1, 2], "another shape"),
    ({"dtype": "uint8", "per": "token"}, [1, 256, 3], "not uint8"),
    ({"dtype": "uint8", "per": "token"}, [1, 0.5, 3], "not uint8"),
    ({"dtype": "uint64", "shape": (2,)}, [0.5, 2**64 - 1], "not uint64"),
    ({"dtype": "uint64", "shape": (2,)}, [-1, 2**64 - 1], "not uint64"),
    ({"dtype": "uint64"}, 2**64, "not uint64"),
    ({"dtype": "uint8", "per": "token", "shape": (2,)}, [[1, 2], [1], [1, 2]], "ragged"),
    ({"dtype": "float32"}, None, "no value"),
    ({"dtype": "float32", "shape": (2,)}, [1.0], "another shape"),
    ({"dtype": "string"}, 3, "no text"),
    ({"dtype": "bool"}, 3, "not bool"),
    ({"dtype": "float32", "per": "token"}, 5, "another shape"),
    ({"dtype": "float32", "per": "token"}, True, "another shape"),
    ({"dtype": "float32"}, 1e300, "not float32"),
    ({"dtype": "float16", "per": "token"}, [1, 70000, 2], "not float16"),
    ({"dtype": "bfloat16", "shape": (2,)}, [0, -1e39], "not bfloat16"),
]


@pytest.mark.parametrize(
    ("column", "value", "reason"), WRONG, ids=[one[2] + str(n) for n, one in enumerate(WRONG)]
)
def test_a_value_that_does_not_fit_quarantines_its_row(
    column: dict[str, Any], value: Any, reason: str
) -> None:
    with pytest.raises(RowFault, match=reason):
        written({"x": CarriedColumn(**column)}, {"x": value}, [1, 1, 1], 3)


TEXTS: list[tuple[str, str, Any]] = [
    ("int8", "-128", -128),
    ("int64", "9007199254740993", 2**53 + 1),
    ("uint64", "18446744073709551615", 2**64 - 1),
    ("float64", "0.1", 0.1),
    ("float64", "-1e-3", -0.001),
    ("float32", "3", 3.0),
    ("bool", "True", True),
    ("bool", "0", False),
    ("float64", "-inf", float("-inf")),
]
NO_NUMBERS = [
    ("int8", "128"), ("int64", "3.0"), ("int64", " 3"), ("int64", "1_000"), ("int64", "1e3"), ("int64", "٣"),
    ("uint8", "-1"), ("float64", "1,5"), ("float64", "1e400"), ("float64", "abc"), ("float16", "70000"), ("bool", "yes"),
    ("int64", "9" * 5000), ("float64", ""),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "text", "number"), TEXTS)
def test_text_of_one_number_is_that_number(dtype: Any, text: str, number: Any) -> None:
    assert written({"x": CarriedColumn(dtype=dtype)}, {"x": text}, [0, 1], 2)["x"] == number


@pytest.mark.parametrize(("dtype", "text"), NO_NUMBERS)
def test_text_that_is_no_such_number_quarantines_its_row(dtype: Any, text: str) -> None:
    with pytest.raises(RowFault, match=f"carried column 'x' is not {dtype}|no value in carried column 'x'"):
        written({"x": CarriedColumn(dtype=dtype)}, {"x": text}, [0, 1], 2)


def test_an_empty_field_is_a_row_without_a_value() -> None:
    assert written({"x": CarriedColumn(dtype="float32", pad=7)}, {"x": ""}, [0, 1], 2)["x"] == 7


def test_a_list_in_a_field_is_json() -> None:
    columns = {
        "v": CarriedColumn(dtype="int16", shape=(2,)),
        "t": CarriedColumn(dtype="float32", per="token"),
    }
    assert written(columns, {"v": "[3, 4]", "t": "[0.5, 1]"}, [0, 1], 2) == {"v": [3, 4], "t": [0.5, 1.0]}
    with pytest.raises(RowFault, match="no JSON list"):
        written(columns, {"v": "[3, 4", "t": "[0.5, 1]"}, [0, 1], 2)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_an_infinity_of_the_source_is_one_of_the_row(dtype: Any) -> None:
    column = CarriedColumn(dtype=dtype, per="token")
    infinity, bits = float("inf"), int(bf16_of([float("inf")])["bfloat16"][0])
    expected = [bits, 0, bits | 0x8000] if dtype == "bfloat16" else [infinity, 0.0, -infinity]
    assert written({"x": column}, {"x": [infinity, 0, -infinity]}, [1, 1, 1], 3)["x"] == expected


def test_a_type_that_nobody_said_is_that_of_the_first_row() -> None:
    source = SourceConfig(path=("a.jsonl",), carry=["domain", "id", "score"])  # type: ignore[arg-type]
    found = resolved(source.carry, {"domain": "math", "id": 3, "score": 0.5})
    assert {name: column.dtype for name, column in found.items()} == {
        "domain": "string", "id": "int64", "score": "float64",
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"source\.carry\.id: is not in the first row"):
        resolved(source.carry, {"domain": "math"})
    with pytest.raises(ValueError, match="'labels' is a name that raysvc uses"):
        SourceConfig(path=("a.jsonl",), carry=["labels"])  # type: ignore[arg-type]


def test_every_column_is_used_carried_or_named(slice_tokenizer: Any, tokenize: Any) -> None:
    tokenizer = slice_tokenizer(CHATML, carry={"domain": CarriedColumn()})
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    rows = [{**row, "domain": "math", "source": "web"}, {**row, "domain": "code", "tools": None, "url": "x"}]
    _, result = tokenize(tokenizer, *rows)
    assert result.table["domain"].to_pylist() == ["math", "code"]
    assert result.left_out == ("source", "url")


def test_a_column_per_token_needs_tokens_of_the_source() -> None:
    with pytest.raises(ConfigError, match="makes the tokens of chat rows"):
        Carrier({"x": CarriedColumn(dtype="uint8", per="token")}, "chat")


def test_a_row_with_a_label_gets_a_mismatched_completion_beside_it(
    slice_tokenizer: Any, tokenize: Any
) -> None:
    tokenizer = slice_tokenizer(CHATML)
    rows = [
        {"prompt": f"{n}:", "completion": f" {word}.", "label": bool(n % 2)} for n, word in enumerate("abc")
    ]
    _, result = tokenize(tokenizer, *rows)
    decode = tokenizer.tokenizer.hf.decode
    texts = [decode(ids).split("<")[0] for ids in result.table["input_ids"].to_pylist()]
    assert result.row_counts.quarantined == {}, result.examples
    assert texts == ["0: a.", "0: c.", "1: b.", "1: a.", "2: c.", "2: b."]
    assert result.table["mismatched"].to_pylist() == [0, 1] * 3
    assert result.table["label"].to_pylist() == [0, 0, 1, 1, 0, 0]
    trained = [
        decode([token for token, hit in zip(ids, mask, strict=True) if hit]).split("<")[0]
        for ids, mask in zip(
            result.table["input_ids"].to_pylist(), result.table["loss_mask"].to_pylist(), strict=True
        )
    ]
    assert [text.strip() for text in trained] == ["a.", "c.", "b.", "a.", "c.", "b."]


def test_arrow_values_keep_the_shape() -> None:
    values = np.arange(12, dtype=np.int16).reshape(2, 3, 2)
    assert arrow_values(values).to_pylist() == values.tolist()


def test_the_spec_of_a_text_holds_what_is_carried() -> None:
    assert TextSpec(tokenizer=TokenizerConfig(name="x")).carry == {}
