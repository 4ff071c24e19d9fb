"""Ranks that are even in the work of the encoder too: the list in `raysvc.plan.even_media`, asserted line by line."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc import row_ids
from raysvc.job.config import PlanConfig
from raysvc.plan.entry_plan import plan_of_entries
from raysvc.plan.groups import Groups
from raysvc.plan.plan import Plan
from raysvc.plan.plan_rows import HeldRows
from raysvc.plan.rank_plan import Rules, deal, deal_pairs

_spec = importlib.util.spec_from_file_location("rank_plans", Path(__file__).with_name("test_rank_plan.py"))
rank_plans = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(rank_plans)

LAYOUTS = {
    "rows": Rules("padded_right", 8, None),
    "tokens": Rules("padded_right", None, 16384, pad_to_multiple=8),
    "packed": Rules("packed", None, 8192, align=16),
    "first_fit": Rules("packed", None, 8192, packing="first_fit"),
}


def image_mix(num_rows, seed):
    """Patches and lengths of rows as vision models train on: 0 to 4 images of 64 to 4096 patches, 50 to 2000 tokens of text.

    Four patches are a token of the language model, as in Qwen-VL.
    """
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 5, num_rows)
    sizes = [np.exp(rng.uniform(np.log(64), np.log(4096), count)).astype(np.int64) for count in counts]
    patches = np.array([each.sum() for each in sizes], np.int64)
    tokens = np.array([(each // 4).sum() for each in sizes], np.int64)
    return patches, (tokens + rng.integers(50, 2001, num_rows)).astype(np.int32)


def over_the_mean(ranks, values):
    loads = np.array([values[rank.rows[rank.rows >= 0]].sum() for rank in ranks])
    return loads.max() / loads.mean()


@settings(max_examples=40)
@given(st.sampled_from(sorted(LAYOUTS)), st.sampled_from([2, 3, 4, 8, 16]), st.integers(0, 2**32 - 1))
def test_encoder_and_language_model_are_both_even_over_ranks(layout, dp_size, seed):
    rules = LAYOUTS[layout]
    patches, lengths = image_mix(64 * dp_size, seed)
    ranks = deal(lengths, dp_size, rules, patches)
    assert over_the_mean(ranks, patches) <= 1.02
    assert over_the_mean(ranks, rules.cost.of(lengths)) <= 1.02
    rank_plans.check(ranks, lengths, dp_size, rules)


def test_without_patches_the_encoder_would_be_uneven():
    patches, lengths = image_mix(512, 0)
    for rules in LAYOUTS.values():
        assert over_the_mean(deal(lengths, 8, rules), patches) > 1.05


def shapes(ranks):
    """Rows of each line of each micro-batch."""
    return [tuple(np.diff(one.lines)[start:stop]) for one in ranks for start, stop in one.micro_batches]


@settings(max_examples=200)
@given(rank_plans.LENGTHS, rank_plans.DP_SIZES, rank_plans.rules(), st.data())
def test_swaps_keep_every_promise_of_a_rank_plan(lengths, dp_size, rules, data):
    patches = data.draw(st.lists(st.integers(0, 5000), min_size=len(lengths), max_size=len(lengths)))
    patches = np.array(patches, np.int64)
    ranks, before = deal(lengths, dp_size, rules, patches), deal(lengths, dp_size, rules)
    rank_plans.check(ranks, lengths, dp_size, rules)
    assert sorted(shapes(ranks)) == sorted(shapes(before)), "whole micro-batches may have changed ranks"
    again = deal(lengths.copy(), dp_size, rules, patches.copy())
    assert [rank.rows.tobytes() for rank in ranks] == [rank.rows.tobytes() for rank in again]


@pytest.mark.parametrize("rules", LAYOUTS.values(), ids=LAYOUTS)
def test_rows_without_media_are_dealt_as_before(rules):
    _, lengths = image_mix(200, 3)
    without = deal(lengths, 4, rules)
    for patches in (None, np.zeros(200, np.int64)):
        for one, other in zip(deal(lengths, 4, rules, patches), without, strict=True):
            assert one.micro_batches == other.micro_batches
            assert np.array_equal(one.rows, other.rows)
            assert np.array_equal(one.lines, other.lines)


def test_media_decide_ranks_and_not_which_rows_a_step_has():
    patches, lengths = image_mix(1000, 5)
    config = PlanConfig(batch_size=256, mini_batch_size=128, micro_batch_tokens=16384, layout="packed")
    text, media = (
        Plan(config, lengths),
        Plan(config, HeldRows(lengths, Groups.singles(len(lengths)), patches)),
    )
    assert media.hash == text.hash
    for step in range(4):
        for one, other in zip(media.step(step, 4).mini_batches, text.step(step, 4).mini_batches, strict=True):
            assert one.row_ids.tolist() == other.row_ids.tolist()
            assert over_the_mean(one.ranks, patches[one.row_ids]) < over_the_mean(
                other.ranks, patches[one.row_ids]
            )


def test_pairs_with_images_stay_together_and_are_even():
    patches, lengths = image_mix(512, 7)
    ranks = deal_pairs(lengths, 4, LAYOUTS["packed"], patches)
    assert over_the_mean(ranks, patches) <= 1.02
    for rank in ranks:
        real = rank.rows[rank.rows >= 0].reshape(-1, 2)
        assert (real[:, 0] % 2 == 0).all()
        assert (real[:, 1] == real[:, 0] + 1).all()


class Source:
    """An entry, as a plan sees it."""

    listings = None

    def __init__(self, key, lengths, patches=None):
        self.key, self.num_rows, self.recipe, self._patches = key, len(lengths), {"format": "chat"}, patches
        self.columns = {} if patches is None else {"media_patches": "int32"}
        self._lengths, self.slice_starts = lengths, np.array([0, len(lengths)])

    def lengths(self):
        return self._lengths

    def row_values(self, name):
        assert name == "media_patches"
        return self._patches


def test_a_mixture_of_images_and_text_is_even_in_both():
    patches, lengths = image_mix(600, 9)
    text = np.random.default_rng(1).integers(50, 2001, 600).astype(np.int32)
    entries = [Source("text", text), Source("images", lengths, patches.astype(np.int32))]
    config = PlanConfig(batch_size=512, micro_batch_tokens=8192, layout="packed")
    plan = plan_of_entries(config, entries, [(0, (600, 600))])
    (mini,) = plan.step(0, 8).mini_batches
    places = row_ids.split(mini.row_ids)
    of_rows = np.concatenate([np.zeros(600, np.int64), patches])[places.source * 600 + places.row]
    assert over_the_mean(mini.ranks, of_rows) <= 1.02
    assert over_the_mean(mini.ranks, plan.rules.cost.of(mini.lengths)) <= 1.02
    assert not plan_of_entries(config, entries[:1]).rows.have_media
