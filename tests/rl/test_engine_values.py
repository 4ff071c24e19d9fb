"""Puts as engines give them: tensors of torch, and values that lie as the engine counts; oracle: the values by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raysvc.errors import SourceError
from raysvc.job.column_dtypes import BF16, bf16_of
from raysvc.rl.group import Group
from raysvc.rl.group_table import groups_of, table_of

torch: Any = pytest.importorskip("torch")

IDS, MASK = [[5, 6, 7, 8], [9, 4]], [[0, 1, 0, 1], [0, 1]]


def put(values: Any, align: str | None = None, **rows: Any) -> Group:
    """The group as it comes back from the table."""
    named: Any = {"x": align} if align else {}
    return groups_of(table_of([Group("p", IDS, MASK, {"x": values}, rows, align=named)]))[0]


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]
)
def test_tensors_come_back_with_their_dtype(dtype: str) -> None:
    values = [
        torch.tensor([1, 0, 1, 1]).to(getattr(torch, dtype)),
        torch.ones(2, dtype=getattr(torch, dtype)),
    ]
    back = put(values, reward=torch.ones(2, requires_grad=True))
    assert back.tokens["x"][0].dtype.name == ("float32" if dtype == "float64" else dtype)
    assert [each.tolist() for each in back.tokens["x"]] == [each.tolist() for each in values]
    assert back.rows["reward"].tolist() == [1.0, 1.0]


def test_bfloat16_tensors_keep_their_bits_whatever_their_strides() -> None:
    numbers = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    wide = numbers.t().to(torch.bfloat16)  # [4, 2], not contiguous
    back = put([wide, wide[:2]], reward=[torch.tensor(0.3, dtype=torch.bfloat16)] * 2)
    assert back.tokens["x"][0].dtype == back.rows["reward"].dtype == BF16
    wanted = bf16_of(numbers.numpy().T)
    assert np.array_equal(back.tokens["x"][0], wanted)
    assert np.array_equal(back.tokens["x"][1], wanted[:2])
    assert np.array_equal(back.rows["reward"], bf16_of([0.3, 0.3]))


def test_a_put_may_be_all_tensors_or_lists_of_them() -> None:
    ids = [torch.tensor(each) for each in IDS]
    mask = [torch.tensor(each, dtype=torch.bool) for each in MASK]
    logprobs = [[torch.tensor(-0.5)] * 4, [torch.tensor(-1.0)] * 2]
    back = groups_of(table_of([Group("p", ids, mask, {"logprobs": logprobs})]))[0]
    assert [each.tolist() for each in back.input_ids] == IDS
    assert [each.tolist() for each in back.loss_mask] == MASK
    assert [each.tolist() for each in back.tokens["logprobs"]] == [[-0.5] * 4, [-1.0] * 2]


@pytest.mark.parametrize(
    ("align", "values", "wanted"),
    [
        ("this_token", [[1, 2, 3, 4], [5, 6]], [[1, 2, 3, 4], [5, 6]]),
        ("this_token", [[1, 2, 3], [5]], [[1, 2, 3, 0], [5, 0]]),
        ("next_token", [[1, 2, 3], [5]], [[0, 1, 2, 3], [0, 5]]),
        ("next_token", [[1, 2, 3, 4], [5]], [[0, 1, 2, 3], [0, 5]]),
        ("response", [[1, 2], [5]], [[0, 1, 0, 2], [0, 5]]),
    ],
)
def test_values_are_laid_at_the_token_they_are_about(align: str, values: Any, wanted: Any) -> None:
    flat = put(values, align)
    assert [each.tolist() for each in flat.tokens["x"]] == wanted
    assert not flat.align  # they lie now
    wide = put([torch.tensor(each).to(torch.bfloat16)[:, None].expand(-1, 3) for each in values], align)
    for got, line in zip(wide.tokens["x"], wanted, strict=True):
        assert np.array_equal(got, np.repeat(bf16_of(line)[:, None], 3, axis=1))


@pytest.mark.parametrize(
    ("values", "align", "told"),
    [
        (
            [[1, 2], [5]],
            "next_token",
            "has 2 values in 'x' of sequence 0, which has 4 tokens, 2 of them trained",
        ),
        ([[1, 2, 3], [5]], "response", "has 3 values in 'x' of sequence 0"),
        ([[1, 2, 3], [5]], None, "say in align how they lie"),
        ([[1, 2, 3], [5]], "last", "give one of this_token, next_token, response"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(values: Any, align: str | None, told: str) -> None:
    with pytest.raises(SourceError, match=told):
        put(values, align)


def test_what_no_column_can_be_is_refused_by_name() -> None:
    with pytest.raises(SourceError, match="aligns 'y', and its tokens have x"):
        table_of([Group("p", IDS, MASK, {"x": MASK}, align={"y": "response"})])
    with pytest.raises(SourceError, match="align of type str"):
        table_of([Group("p", IDS, MASK, {"x": MASK}, align="response")])  # type: ignore[arg-type]
    bad = [
        torch.tensor([0.0, float("nan"), 0, 0], dtype=torch.bfloat16),
        torch.zeros(2, dtype=torch.bfloat16),
    ]
    with pytest.raises(SourceError, match="'x' of sequence 0 that is not finite"):
        put(bad)
    with pytest.raises(SourceError, match="loss_mask that is neither 0 nor 1"):
        table_of([Group("p", IDS, [torch.ones(len(each), dtype=torch.bfloat16) for each in IDS])])
