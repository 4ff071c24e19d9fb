"""Builders that die: the list in `raysvc.pipelines.shared_build`, with deaths as Ray tells them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from ray.exceptions import RayActorError

from raysvc.cache.manifest import Receipt
from raysvc.pipelines import shared_build
from raysvc.pipelines.shared_build import MAX_DEATHS, Work, shared_receipts

WORK = Work("/cache/key", 1, lambda: iter(()))


def told_by(calls: list[str | None], monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Calls of a builder end as told: by the death of the one that is named, or well. How many there were."""
    left = iter(calls)

    def follow(work: Work) -> Iterator[tuple[int, Receipt]]:
        if (dead := next(left)) is not None:
            raise RayActorError(dead, f"{dead} died")
        yield from ()

    monkeypatch.setattr(shared_build, "_follow", follow)
    monkeypatch.setattr(shared_build, "POLL_S", 0.0)
    return lambda: len(calls) - len(list(left))


def test_a_dead_builder_that_is_found_again_and_again_is_one_death(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = told_by(["first"] * 3 * MAX_DEATHS + ["second", None], monkeypatch)
    assert list(shared_receipts(WORK)) == []
    assert made() == 3 * MAX_DEATHS + 2
    assert [text.split(": ")[1] for text in caplog.messages] == ["first died", "second died"]


def test_builders_that_die_one_after_the_other_end_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    made = told_by([f"number {n}" for n in range(2 * MAX_DEATHS)], monkeypatch)
    with pytest.raises(RuntimeError, match=f"{MAX_DEATHS} builders of /cache/key died"):
        list(shared_receipts(WORK))
    assert made() == MAX_DEATHS


def test_a_cluster_that_never_forgets_a_dead_builder_ends_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_build, "FORGET_S", 0.0)
    told_by(["first"] * 1000, monkeypatch)
    with pytest.raises(RuntimeError, match="1 builder of /cache/key died"):
        list(shared_receipts(WORK))
