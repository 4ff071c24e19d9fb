"""A rank asks for the steps of one stream, waits for them, and opens them: with a connection and answers of the test."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest
import ray

from raysvc.actors.server.spec import Role, StepInfo
from raysvc.client import rank_reader
from raysvc.client.connection import POLL_S
from raysvc.client.rank_reader import RankReader, StepFetch, pause_s
from raysvc.collate.info import MiniBatchInfo
from raysvc.collate.shard import Denominators
from raysvc.errors import FencedError, StepFailed, StepOutOfOrder


class Answers:
    """A connection; `late` polls pass before its answers are there."""

    def __init__(self, values: list[Any], late: int = 0, error: Exception | None = None) -> None:
        self.values, self.late, self.error = values, late, error
        self.calls: list[tuple[Any, ...]] = []
        self.lease = SimpleNamespace(name="served")

    def fetch_rank(self, *asked: Any) -> list[str]:
        self.calls.append(asked)
        return [f"ref {n}" for n in range(len(self.values))]

    def sizes(self, *asked: Any) -> Any:
        self.calls.append(asked)
        return lambda: self.values

    def note_order(self, step: StepInfo) -> None:
        self.calls.append(("order of", step.index))

    def arrived(self, step: StepInfo) -> None:
        self.calls.append(("arrived", step.index))

    def check(self) -> None:
        self.calls.append(("check",))
        if isinstance(self.error, FencedError):
            raise self.error

    def get(self, refs: list[str]) -> tuple[Any, ...]:
        self.calls.append(("get", *refs))
        if self.error:
            raise self.error
        return tuple(self.values)


def info(index: int) -> StepInfo:
    return StepInfo(index, 2, ("minis",), (), 1.0, 2.0, None, 4.0, 5.0)  # type: ignore[arg-type]


def reader(answers: Answers, monkeypatch: pytest.MonkeyPatch, stream: str = "") -> RankReader:
    """A reader whose shards are copied to ("own", shard), and open to ("opened", ...)."""
    left = [answers.late]

    def are_made(refs: list[str], timeout_s: float) -> bool:
        assert (timeout_s, len(refs)) == (POLL_S, len(answers.values))
        left[0] -= 1
        return left[0] < 0

    def get(refs: list[str]) -> list[Any]:
        assert len(refs) == len(answers.values)
        if answers.error:
            raise ray.exceptions.RayError("gone")
        return list(answers.values)

    monkeypatch.setattr(rank_reader, "are_made", are_made)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(rank_reader, "read_shard", lambda wire: ("opened", *wire))
    monkeypatch.setattr(rank_reader, "private", lambda wire: ("own", wire))
    return RankReader(answers, Role(3), stream)  # type: ignore[arg-type]


def test_shards_that_a_living_server_lost_are_asked_for_once_more_and_then_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each server puts its shards under a ref of its own, so the same ref twice is the same server."""
    refs = [ray.ObjectRef(bytes([n]) * 28, skip_adding_local_ref=True) for n in (1, 2)]
    answers = Answers([])
    left = [refs[0], refs[1], refs[1]]

    def values(asked: list[Any]) -> list[Any]:
        if asked in ([refs[0]], [refs[1]]):
            raise ray.exceptions.ObjectLostError("11" * 28, None, "")
        return [["info", left.pop(0), False]]

    monkeypatch.setattr(StepInfo, "of_rank", lambda info: SimpleNamespace(mini_batches=[1, 2]))
    opening = RankReader(answers, Role(3))  # type: ignore[arg-type]
    monkeypatch.setattr(opening, "_values", values)
    with pytest.raises(StepFailed, match="could not make step 7: its shards are lost and the server lives"):
        opening.arrive(StepFetch(7, []))
    assert (left, answers.calls) == ([], [(7, Role(3), 2, "")] * 2)


@pytest.mark.parametrize("late", [0, 3])
def test_a_step_is_asked_for_waited_for_and_opened_as_private_copies(
    late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = Answers([info(7), "a", "b"], late)
    own = reader(answers, monkeypatch, "held out")
    fetch = own.ask(7, 2)
    assert answers.calls == [(7, Role(3), 2, "held out")]
    assert fetch == StepFetch(7, ["ref 0", "ref 1", "ref 2"])
    step = own.arrive(fetch)
    assert answers.calls[1:] == [("check",)] * late + [("order of", 7)], "an eval has no commits"
    assert (step.index, step.epoch, step.infos) == (7, 2, ("minis",))
    assert step.shards == (("opened", "own", "a"), ("opened", "own", "b"))
    assert (step.read_s, step.collate_s, step.groups_s, step.build_s) == (1.0, 2.0, 4.0, 5.0)
    assert 0 <= step.copy_s < 1


def test_the_one_answer_of_a_server_opens_as_those_of_a_collator(monkeypatch: pytest.MonkeyPatch) -> None:
    mini = MiniBatchInfo(
        row_ids=np.array([5, 1 << 52]), lengths=np.array([3, 4], np.int32), denominators=Denominators(7, 2, 1), num_dummies=1,
        num_cells=8, pad_share=0.5, rank_tokens=(3, 4, 2), rank_bytes=(1 << 40, 2, 3), num_micro_batches=1,
    )  # fmt: skip
    rows = ((np.array([0], np.int32),),)
    told = StepInfo(7, 2, (mini,), (rows,), 1.0, 2.0, (3, 4), 5.0, 6.0, "order")
    answer = msgpack.unpackb(msgpack.packb([told.for_rank(8), "a"], strict_types=True))
    opened, shards, first = reader(Answers([answer]), monkeypatch)._opened(StepFetch(7, ["ref"]))
    assert (shards, first) == (["a"], True)
    assert (opened.rows, opened.frontier) == ((), 8)
    plain = {**vars(told), "rows": (), "frontier": 8, "mini_batches": opened.mini_batches}
    assert vars(opened) == plain
    (again,) = opened.mini_batches
    for field in fields(mini):
        before, after = getattr(mini, field.name), getattr(again, field.name)
        if isinstance(before, np.ndarray):
            assert (after.dtype, after.tolist()) == (before.dtype, before.tolist())
        else:
            assert (after, type(after)) == (before, type(before))


def test_a_step_that_was_not_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = reader(Answers([info(8), "a"]), monkeypatch)
    with pytest.raises(StepOutOfOrder) as refused:
        own.arrive(own.ask(7, 1))
    assert (refused.value.name, refused.value.step, refused.value.expected) == ("served", 8, "step 7")


def test_the_servers_own_error_comes_and_a_detached_client_waits_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed, fenced = StepFailed("served", 7, "no rows"), FencedError("served", 1, 2)
    own = reader(Answers([info(7), "a"], error=failed), monkeypatch)
    with pytest.raises(StepFailed) as raised:
        own.arrive(own.ask(7, 1))
    assert raised.value is failed
    own = reader(Answers([info(7), "a"], late=10**6, error=fenced), monkeypatch)
    with pytest.raises(FencedError):
        own.arrive(own.ask(7, 1))


def test_what_the_connection_gets_after_a_broken_answer_is_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers([info(7), "a"])
    own = reader(answers, monkeypatch)

    def gone(refs: list[str]) -> list[Any]:
        raise ray.exceptions.RayError("gone")

    monkeypatch.setattr(ray, "get", gone)
    assert own.arrive(own.ask(7, 1)).shards == (("opened", "own", "a"),)
    assert ("get", "ref 0", "ref 1") in answers.calls


def test_sizes_are_those_of_one_rank_and_unknown_ones_stay_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers([10, None, 0])
    wait = reader(answers, monkeypatch, "s").ask_sizes(4, 7)
    assert answers.calls == [(4, 7, (Role(3),), "s")]
    assert wait() == [3, None, 0]


@pytest.mark.parametrize(
    ("since_s", "pause"), [(0.0, 0.002), (0.008, 0.002), (0.1, 0.025), (1.0, 0.25), (9.0, 0.25)]
)
def test_the_thread_looks_after_a_quarter_of_the_time_since_the_last_step(
    since_s: float, pause: float
) -> None:
    assert pause_s(100.0, 100.0 + since_s) == pytest.approx(pause)
