"""A shard cut for context-parallel ranks: every token once, labels where they are predicted, work even, weights whole."""

from __future__ import annotations

import functools
import itertools
import operator
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.actors.server.make_step import Recipe, make_step
from raysvc.actors.server.spec import Role
from raysvc.collate.cp_cut import cp_cut
from raysvc.collate.loss_weights import token_weights
from raysvc.collate.shard import Shard
from raysvc.errors import ConfigError
from raysvc.job.config import PlanConfig
from raysvc.plan.plan import Plan
from raysvc.plan.rank_plan import DUMMY_LENGTH
from tests.collate.conftest import collate_step, random_data

COLUMNS = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "labels",
    "loss_mask",
    "advantages",
    "router",
    "reward",
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "packed": {"layout": "packed", "micro_batch_tokens": 96},
    "padded_right": {"layout": "padded_right", "micro_batch_size": 3},
    "padded_left": {"layout": "padded_left", "micro_batch_tokens": 200},
    "stream": {"layout": "stream", "window": 48, "micro_batch_size": 2},
}
SPLITS = ("zigzag", "head_tail", "contiguous")


def shards_of(lengths: list[int], layout: str, cp: int, dp: int, seed: int) -> tuple[Shard, ...]:
    config = PlanConfig(
        batch_size=len(lengths), columns=COLUMNS, align=2 * cp, pad_to_multiple=2 * cp, **LAYOUTS[layout]
    )
    [(_, shards)] = collate_step(random_data(lengths, seed), config, dp)
    return shards


def cells_of(micro: dict[str, Any]) -> list[tuple[Any, ...]]:
    """(line, row on it or 0, position, id) of every cell with a token, of a shard or of a part of one."""
    lines, columns = np.nonzero(micro["attention_mask"])
    rows = micro["segment_ids"][lines, columns] if "segment_ids" in micro else np.zeros(len(lines), np.int64)
    where = micro["position_ids"][lines, columns], micro["input_ids"][lines, columns]
    return list(zip(lines.tolist(), rows.tolist(), *(each.tolist() for each in where), strict=True))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 48), min_size=1, max_size=14),
    layout=st.sampled_from(sorted(LAYOUTS)),
    split=st.sampled_from(SPLITS),
    cp=st.sampled_from([1, 2, 3, 4]),
    dp=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_every_token_is_on_one_rank_with_the_label_that_it_predicts(
    lengths: list[int], layout: str, split: Any, cp: int, dp: int, seed: int
) -> None:
    for shard in shards_of(lengths, layout, cp, dp, seed):
        parts = cp_cut(shard, cp, split)
        assert len(parts) == cp
        for number in range(len(shard.micro_batches)):
            whole, own = shard.micro(number), [part.micro(number) for part in parts]
            assert sorted(functools.reduce(operator.iadd, map(cells_of, own), [])) == sorted(cells_of(whole))
            expected = _predicted(whole)
            for part in own:
                assert part["input_ids"].shape[1] * cp == whole["input_ids"].shape[1]
                for name in ("advantages", "router"):
                    assert part[name].shape == part["labels"].shape
                for line, column in zip(*np.nonzero(part["labels"] != -100), strict=True):
                    key = (line, *(int(part[name][line, column]) for name in _NAMES if name in part))
                    told = [
                        part[name][line, column] for name in ("labels", "loss_mask", "advantages", "router")
                    ]
                    assert expected.pop(key) == told
            assert not expected, "each label once"
            num_tokens = [part.micro_batches[number].num_tokens for part in parts]
            assert sum(num_tokens) == shard.micro_batches[number].num_tokens
            if "attention_mask" in own[0]:
                assert num_tokens == [int(part["attention_mask"].sum()) for part in own]


_NAMES = ("segment_ids", "position_ids", "input_ids")


def _predicted(micro: dict[str, Any]) -> dict[tuple[int, ...], list[Any]]:
    """What each token with a target must be told: label, mask and extra columns of the next token on its line."""
    found = {}
    for line, column in zip(*np.nonzero(micro["labels"] != -100), strict=True):
        before = column - 1
        key = (line, *(int(micro[name][line, before]) for name in _NAMES if name in micro))
        found[key] = [micro[name][line, column] for name in ("labels", "loss_mask", "advantages", "router")]
    return found


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=2, max_size=12),
    layout=st.sampled_from(sorted(LAYOUTS)),
    split=st.sampled_from(SPLITS),
    cp=st.sampled_from([2, 4]),
    reduction=st.sampled_from(["token_mean", "sequence_mean", "group_mean", "prompt_mean"]),
)
def test_weights_and_rows_are_those_of_the_whole_mini_batch(
    lengths: list[int], layout: str, split: Any, cp: int, reduction: Any
) -> None:
    for shard in shards_of(lengths, layout, cp, 2, 0):
        parts = cp_cut(shard, cp, split)
        weights = token_weights(shard.arrays, shard.denominators, reduction, dtype=np.float64)
        of_parts = [
            token_weights(part.arrays, part.denominators, reduction, dtype=np.float64) for part in parts
        ]
        assert sum(each.sum() for each in of_parts) == pytest.approx(weights.sum(), rel=1e-12)
        together = np.sort(np.concatenate([each[each > 0] for each in of_parts]))
        np.testing.assert_allclose(together, np.sort(weights[weights > 0]), rtol=1e-12)
        for part in parts:
            assert part.row_ids.tolist() == shard.row_ids.tolist()
            assert part.denominators == shard.denominators
            for name in ("seq_lengths", "row_tokens", "reward"):
                assert part.arrays[name].tolist() == shard.arrays[name].tolist()


@pytest.mark.parametrize("cp", [2, 4])
def test_boundaries_are_given_for_the_whole_line_and_for_the_own_part(cp: int) -> None:
    (shard,) = shards_of([9, 30, 5, 17, 41, 2, 26], "packed", cp, 1, 0)
    for part in cp_cut(shard, cp, "zigzag"):
        assert part.arrays["cu_seqlens"].tolist() == shard.arrays["cu_seqlens"].tolist()
        for number in range(len(part.micro_batches)):
            micro = part.micro(number)
            offsets = micro["cu_seqlens_offsets"] - micro["cu_seqlens_offsets"][0]
            for line, (first, last) in enumerate(itertools.pairwise(offsets)):
                bounds = micro["cu_seqlens_local"][first:last].tolist()
                for row, (begin, end) in enumerate(itertools.pairwise(bounds), 1):
                    assert set(micro["segment_ids"][line, begin:end].tolist()) <= {0, row}
                rows = set(micro["segment_ids"][line, bounds[-1] :].tolist())
                assert rows <= {0}, "padding alone lies behind the last row"
    assert "cu_seqlens_local" not in cp_cut(shard, cp, "contiguous")[0].arrays


def test_the_parts_of_a_row_are_those_of_transformer_engine() -> None:
    """`thd_get_partitioned_indices` of Transformer Engine, by its documentation: of 2 * cp chunks number r and 2 * cp - 1 - r."""
    (shard,) = shards_of([16, 8], "packed", 2, 1, 0)
    first, second = cp_cut(shard, 2, "zigzag")
    lengths = shard.arrays["seq_lengths"].tolist()
    theirs: list[list[int]] = [[], []]
    for length in lengths:
        chunk = length // 4
        for rank in range(2):
            for number in (rank, 3 - rank):
                theirs[rank] += range(number * chunk, (number + 1) * chunk)
    for part, positions in zip((first, second), theirs, strict=True):
        assert part.arrays["position_ids"][0, : len(positions)].tolist() == positions


def causal_work(part: Shard) -> float:
    """Pairs of a token and one that it sees, dummies and padding apart."""
    used = part.arrays["attention_mask"] > 0
    return float((part.arrays["position_ids"][used].astype(np.float64) + 1).sum())


DATA = Path(os.environ.get("RAYSVC_SHARED", Path(__file__).parents[3] / "shared")) / "data"


@pytest.mark.parametrize("cp", [2, 4])
def test_the_work_of_a_zigzag_is_even_to_a_hundredth_on_real_lengths(cp: int) -> None:
    file = DATA / "tau_airline_rollouts.jsonl"
    if not file.exists():
        pytest.skip(f"needs {file}")
    lengths = [max(2, len(line) // 4) for line in file.read_text().splitlines()][:64]
    config = PlanConfig(
        batch_size=len(lengths),
        columns=COLUMNS,
        align=2 * cp,
        layout="packed",
        micro_batch_tokens=max(lengths) + 8,
    )
    [(_, (shard,))] = collate_step(random_data(lengths), config, 1)
    work = {split: [causal_work(part) for part in cp_cut(shard, cp, split)] for split in SPLITS}  # type: ignore[arg-type]
    shares = {split: max(own) / np.mean(own) for split, own in work.items()}
    assert shares["zigzag"] < 1.01
    assert min(shares["contiguous"], shares["head_tail"]) > 1.1


@pytest.mark.parametrize("split", SPLITS)
def test_a_row_that_does_not_divide_is_refused_by_name(split: Any) -> None:
    config = PlanConfig(batch_size=4, columns=COLUMNS, layout="packed", micro_batch_tokens=63)
    [(_, (shard,))] = collate_step(random_data([9, 31, 5, 17]), config, 1)
    with pytest.raises(ConfigError, match=r"plan.align: rows and lines do not divide into 4 parts, for cp=2"):
        cp_cut(shard, 2, split)
    (whole,) = cp_cut(shard, 1, split)
    assert whole.arrays["input_ids"].tolist() == shard.arrays["input_ids"].tolist(), "one rank has all"
    assert whole.arrays["labels"][:, :-1].tolist() == shard.arrays["labels"][:, 1:].tolist(), (
        "labels move all the same"
    )


def test_a_rank_of_dummies_is_cut_like_any_other() -> None:
    shards = shards_of([12], "packed", 2, 3, 0)
    dummies = next(shard for shard in shards if (shard.row_ids < 0).all())
    parts = cp_cut(dummies, 2, "zigzag")
    assert sum(int(part.arrays["attention_mask"].sum()) for part in parts) == DUMMY_LENGTH * len(
        dummies.row_ids
    )
    assert all((part.arrays["labels"] == -100).all() for part in parts)


def test_media_are_refused_where_lines_are_cut() -> None:
    data = random_data([9, 12, 5])
    config = PlanConfig(batch_size=3, cp_split="zigzag")
    recipe = Recipe(config, 0).of(Role(1, cp=2))
    media: Any = SimpleNamespace(planned=lambda sizes, mini: sizes, fill=lambda shard, rows: shard)
    plan = Plan(config, data.lengths).step(0, 1, 2)
    with pytest.raises(ConfigError, match=r"plan.cp_split: is set, and the rows have media"):
        make_step([plan], lambda mini: data.take(mini.row_ids), [recipe], media=media)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20), dp=st.integers(1, 3), cp=st.integers(1, 4)
)
def test_a_step_has_the_same_rows_whatever_the_mesh_is(lengths: list[int], dp: int, cp: int) -> None:
    config = PlanConfig(batch_size=len(lengths), layout="packed", micro_batch_tokens=48)
    plan = Plan(config, np.array(lengths, np.int32))
    [mini], [cut] = plan.step(0, dp).mini_batches, plan.step(0, dp, cp).mini_batches
    assert cut.row_ids.tolist() == mini.row_ids.tolist()
    placed = np.concatenate([rank.rows for rank in cut.ranks])
    assert sorted(placed[placed >= 0].tolist()) == list(range(len(lengths)))
