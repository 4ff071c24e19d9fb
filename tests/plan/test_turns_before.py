"""`Mixture.turns_before`, which says what a run has come by of each source, beside a count of the stream itself."""

from __future__ import annotations

import random

import numpy as np

from raysvc.plan.mixture import Mixture, MixtureSource, Stage


def test_turns_before_a_position_are_those_of_the_stream_that_lies_before_it() -> None:
    chance, beyond = random.Random(0), 0
    for _ in range(40):
        count = chance.randint(2, 4)
        sources = tuple(MixtureSource(f"{number}", 1000) for number in range(count))
        first = chance.randint(5, 40)
        stages = tuple(
            Stage(begin, tuple(chance.randint(1, 7) for _ in range(count))) for begin in (0, first)
        )
        mixture = Mixture(sources, stages)
        source_of, _ = mixture._turns(np.arange(100))
        for position in range(100):
            came = np.bincount(source_of[:position], minlength=count).tolist()
            assert mixture.turns_before(position) == came
            if position < first:  # as if each came evenly spread
                shares = [share * position // stages[0].period for share in stages[0].counts]
                beyond += any(share > real for share, real in zip(shares, came, strict=True))
    assert beyond, "shares go beyond what came: whoever builds from a share on would leave a slice out"
