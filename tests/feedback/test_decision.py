"""Decisions: the lists in `raysvc.feedback.decision` and `raysvc.actors.server.trainer_feedback`, without Ray."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc import row_ids
from raysvc.actors.server.batch_server import BatchServer
from raysvc.actors.server.collator import Collator
from raysvc.actors.server.entry_stream import streams_of
from raysvc.actors.server.spec import TRAIN, Part, Role, ServeSpec
from raysvc.cache.find import open_finished
from raysvc.errors import (
    EntryError,
    FencedError,
    FolderLost,
    PlanError,
    ServerError,
    StateMismatch,
    StepOutOfOrder,
)
from raysvc.feedback.feedback_log import FeedbackLog
from raysvc.feedback.request import Request
from raysvc.plan.entry_plan import plan_of_entries
from raysvc.plan.mixture import counts_by_weight

from .mixed_server import NAMES, ROWS, Trainer, mixed_spec, sources_of

STEPS = 40
EVENTS = ("train", "ahead", "weights", "skip", "again", "server", "trainer")
LIKELY = (0.5, 0.1, 0.1, 0.05, 0.1, 0.1, 0.05)


def server_of(spec: ServeSpec) -> BatchServer:
    """A server that was just started, or started again."""
    return BatchServer(spec.model_dump_json(), "i")


def planned(spec: ServeSpec) -> list[list[list[int]]]:
    """Step -> rows of each mini-batch, of a job that had planned from the start what was decided: no decision is made here."""
    assert spec.mixture is not None
    decisions = FeedbackLog(f"{spec.journal}/feedback").decisions()
    stages = dict(spec.mixture.stages)
    for one in decisions:
        if one.weights is not None:
            stages[one.from_step * 8] = counts_by_weight([one.weights[name] for name in NAMES], ROWS)
    entries = [open_finished(one.uri) for one in spec.sources]
    plan = plan_of_entries(spec.plan, entries, sorted(stages.items()))
    found = []
    for step in range(STEPS):
        gone = {row for one in decisions if one.from_step <= step for row in one.skip_rows}
        minis = [mini.row_ids.tolist() for mini in plan.step(step, 1).mini_batches]
        found.append([[row for row in mini if row not in gone] for mini in minis])
    return found


def known_already(server: BatchServer, request: Request) -> bool:
    """Whether a decision that was made does what is asked for."""
    for one in server.decisions():
        if one["from_step"] == request.from_step and one["skip_rows"] == tuple(
            sorted(set(request.skip_rows))
        ):
            if (one["weights"] is None) != (request.weights is None):
                continue
            if request.weights is None or one["weights"] is None:
                return True
            pairs = ([each[name] for name in NAMES] for each in (one["weights"], request.weights))
            if len({counts_by_weight(pair, ROWS) for pair in pairs}) == 1:
                return True
    return False


@pytest.mark.slow
@settings(max_examples=12)
@given(seed=st.integers(0, 2**32 - 1))
def test_whatever_is_decided_killed_and_resumed_the_rows_are_those_that_the_journal_says(
    seed: int, uris: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = np.random.default_rng(seed)
    spec = mixed_spec(uris, tmp_path_factory.mktemp("run"))
    server = server_of(spec)
    trainer = Trainer(server)
    taken: dict[int, list[list[int]]] = {}
    saved, requests, done = [trainer.state(0)], [], 0
    while done < STEPS:
        what = rng.choice(EVENTS, p=LIKELY)
        if what == "train":
            taken[done] = trainer.rows(done, int(rng.integers(1, 4)))
            done += 1
            if rng.random() < 0.4:
                saved.append(trainer.state(done))
        elif what == "ahead":  # staged, and perhaps never trained
            for step in range(done, min(done + 3, STEPS)):
                taken[step] = trainer.rows(step)
        elif what in ("weights", "skip"):
            step = int(rng.integers(1, STEPS))
            shares = dict(zip(NAMES, rng.integers(0, 4, 3).tolist(), strict=True))
            source = int(rng.integers(len(ROWS)))
            rows = tuple((row_ids.source_base(source) + rng.integers(0, ROWS[source], 5)).tolist())
            if not any(shares.values()):
                continue
            request = (
                Request(str(len(requests)), step, shares)
                if what == "weights"
                else Request(str(len(requests)), step, None, rows)
            )
            known = len(server.decisions())
            if step < trainer.asked and not known_already(server, request):
                with pytest.raises(StepOutOfOrder, match="handed out"):
                    trainer.decide(request)
                assert len(server.decisions()) == known
            else:
                assert trainer.decide(request) == step
                requests.append(request)
                assert len(server.decisions()) <= known + 1
        elif what == "again" and requests:
            known = server.decisions()
            trainer.decide(requests[int(rng.integers(len(requests)))])
            assert server.decisions() == known
        elif what == "server":
            server = trainer.server = server_of(spec)
        elif what == "trainer":
            trainer = Trainer(server)
            del saved[max(1, len(saved) - int(rng.integers(0, 4))) :]  # from one of the last checkpoints
            trainer.restore(saved[-1])
            done = trainer.asked
            taken = {step: rows for step, rows in taken.items() if step < done}
    expected = planned(spec)
    assert [taken[step] for step in range(STEPS)] == expected
    assert [Trainer(server_of(spec)).rows(step) for step in range(STEPS)] == expected


@settings(max_examples=15)
@given(
    weights=st.lists(st.integers(0, 50), min_size=3, max_size=3).filter(any),
    from_step=st.integers(0, STEPS - 1),
)
def test_weights_hold_from_their_step_on_and_within_half_a_row_a_source(
    weights: list[int], from_step: int, uris: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    spec = mixed_spec(uris, tmp_path_factory.mktemp("run"))
    plain = Trainer(server_of(mixed_spec(uris, tmp_path_factory.mktemp("plain"))))
    trainer = Trainer(server_of(spec))
    assert trainer.weights(*weights, from_step=from_step) == from_step
    before = [trainer.rows(step) for step in range(from_step)]
    assert before == [plain.rows(step) for step in range(from_step)]
    counts = np.array(counts_by_weight(weights, ROWS))
    came = np.zeros(3, np.int64)
    for step in range(from_step, STEPS):
        came += sources_of([row for mini in trainer.rows(step) for row in mini])
        exact = came.sum() * counts / counts.sum()
        assert np.abs(came - exact).max() <= len(NAMES) / 2
        assert not came[np.array(weights) == 0].any()


def test_a_decision_is_refused_by_name(uris: list[str], tmp_path: Path) -> None:
    trainer = Trainer(server_of(mixed_spec(uris, tmp_path / "run")))
    for step in range(3):
        trainer.rows(step)

    def weights(**shares: float) -> Request:
        return Request("x", 20, shares)

    with pytest.raises(StepOutOfOrder, match="refused step 2: expected step 3 or a later one"):
        trainer.weights(1, 1, 1, from_step=2)
    with pytest.raises(StepOutOfOrder, match="refused step 40: expected a step below 40"):
        trainer.weights(1, 1, 1, from_step=40)
    with pytest.raises(PlanError, match="there is no source 'd'"):
        trainer.decide(weights(a=1, b=1, c=1, d=1))
    with pytest.raises(PlanError, match="'c' has no weight"):
        trainer.decide(weights(a=1, b=1))
    with pytest.raises(PlanError, match="weights"):
        trainer.decide(weights(a=2, b=-1, c=0))
    with pytest.raises(PlanError, match="there is no row 0:0:190"):
        trainer.skip([190])
    assert trainer.server.decisions() == []
    assert trainer.weights(1, 0, 1) == 3

    late = mixed_spec(uris, tmp_path / "late", stages=((0, (80, 80)), (80, (2, 1, 1))))
    with pytest.raises(PlanError, match="before the last source of the job joins"):
        Trainer(server_of(late)).weights(1, 1, 1, from_step=9)
    shared = Trainer(server_of(mixed_spec(uris, tmp_path / "shared", share="stream")))
    with pytest.raises(ServerError, match="several readers"):
        shared.weights(1, 1, 1)
    spec = mixed_spec(uris, tmp_path / "one")
    single = Trainer(server_of(spec.model_copy(update={"mixture": None})))
    with pytest.raises(PlanError, match="the plan is not a mixture"):
        single.weights(1, 1, 1)
    assert single.skip([5, 7]) == 0
    assert not {5, 7} & {row for step in range(11) for mini in single.rows(step) for row in mini}


def test_the_same_decision_again_adds_nothing_and_of_two_for_a_step_the_later_one_holds(
    uris: list[str], tmp_path: Path
) -> None:
    spec = mixed_spec(uris, tmp_path)
    trainer = Trainer(server_of(spec))
    assert trainer.weights(1, 0, 0, from_step=9) == trainer.weights(2, 0, 0, from_step=9) == 9
    assert len(trainer.server.decisions()) == 1, "the same shares"
    trainer.weights(0, 1, 0, from_step=9)
    trainer.weights(0, 0, 1, from_step=5)
    trainer.weights(1, 0, 0, from_step=9)  # as the first one, but not the one that holds
    trainer.weights(0, 1, 0, from_step=9)
    assert len(trainer.server.decisions()) == 5
    came = [sources_of([row for mini in trainer.rows(step) for row in mini]).tolist() for step in range(12)]
    assert came == [[4, 2, 2]] * 5 + [[0, 0, 8]] * 4 + [[0, 8, 0]] * 3
    assert trainer.weights(1, 0, 0, from_step=9) == 9, "too late, and known"
    assert len(trainer.server.decisions()) == 5


def test_a_plan_without_decisions_has_the_identity_that_it_has_with_them(
    uris: list[str], tmp_path: Path
) -> None:
    trainer = Trainer(server_of(mixed_spec(uris, tmp_path)))
    plain, before = trainer.lease, trainer.state(4)
    trainer.weights(1, 0, 0, from_step=6)
    trainer.skip([1, 2, 3], from_step=7)
    again = Trainer(server_of(trainer.server.spec))
    assert (again.lease.plan_hash, again.lease.identity) == (plain.plan_hash, plain.identity)
    assert again.lease.schedule == plain.schedule
    assert again.state(4) == before
    assert "decided" not in trainer.state(6)
    assert [mark[0] for mark in again.state(8)["decided"]] == [6, 7]


def test_a_checkpoint_that_followed_a_decision_is_refused_where_it_is_not_known(
    uris: list[str], tmp_path: Path
) -> None:
    trainer = Trainer(server_of(mixed_spec(uris, tmp_path / "run")))
    trainer.weights(1, 0, 0, from_step=6)
    trainer.restore(trainer.state(6))  # the next step is the first that followed it
    state = trainer.state(10)
    trainer.restore(state)
    with pytest.raises(StateMismatch, match=r"followed decisions from steps \[6\] on"):
        Trainer(server_of(mixed_spec(uris, tmp_path / "empty"))).restore(state)


def test_a_journal_that_was_cut_is_an_error_that_names_the_decision(uris: list[str], tmp_path: Path) -> None:
    spec = mixed_spec(uris, tmp_path)
    trainer = Trainer(server_of(spec))
    for step in (4, 8, 12):
        trainer.weights(step, 1, 1, from_step=step)
    files = sorted((tmp_path / "feedback" / "decisions").iterdir())
    kept = files[1].read_bytes()
    for damaged in (None, kept[: len(kept) // 2], b"{}"):
        files[1].unlink(missing_ok=True)
        if damaged is not None:
            files[1].write_bytes(damaged)
        with pytest.raises(EntryError, match="decision 1 of this run is missing or damaged"):
            streams_of(spec)[TRAIN].outline(0, 1)
    files[1].write_bytes(kept)
    assert Trainer(server_of(spec)).rows(0)


def test_decisions_of_another_plan_are_refused_and_a_grown_mixture_keeps_them(
    uris: list[str], tmp_path: Path
) -> None:
    few = mixed_spec(uris, tmp_path, stages=((0, (80, 80)),))
    assert few.mixture is not None
    two = few.model_copy(
        update={"mixture": few.mixture.model_copy(update={"names": NAMES[:2]}), "sources": few.sources[:2]}
    )
    trainer = Trainer(server_of(two))
    trainer.decide(Request("x", 6, {"a": 3, "b": 1}))
    rows = [trainer.rows(step) for step in range(12)]
    grown = few.model_copy(
        update={"mixture": few.mixture.model_copy(update={"stages": ((0, (80, 80)), (96, (0, 0, 1)))})}
    )
    again = Trainer(server_of(grown))
    assert [again.rows(step) for step in range(12)] == rows
    assert sources_of([row for mini in again.rows(12) for row in mini]).tolist() == [0, 0, 8]
    other = two.model_copy(update={"plan": two.plan.model_copy(update={"seed": 4})})
    with pytest.raises(
        StateMismatch, match=r"decision from step 6 on: decides for another plan: .*seed was 3"
    ):
        Trainer(server_of(other))


def test_a_trainer_that_was_replaced_decides_nothing_and_a_folder_that_was_moved_away_decides_nothing_more(
    uris: list[str], tmp_path: Path
) -> None:
    old = Trainer(server_of(mixed_spec(uris, tmp_path / "run")))
    plain = [old.rows(step) for step in range(9)]
    new = Trainer(old.server)
    with pytest.raises(FencedError):
        old.weights(1, 0, 0, from_step=20)
    new.weights(1, 0, 0, from_step=4)
    assert [new.rows(step) for step in range(9)][4:] != plain[4:]
    (tmp_path / "run" / "feedback").rename(tmp_path / "feedback")
    again = Trainer(old.server)
    assert [again.rows(step) for step in range(9)] == plain
    assert again.weights(0, 1, 0, from_step=20) == 20
    assert Trainer(server_of(old.server.spec)).server.decisions() == again.server.decisions()


def test_two_servers_on_one_folder_make_no_two_histories(uris: list[str], tmp_path: Path) -> None:
    spec = mixed_spec(uris, tmp_path)
    old, new = Trainer(server_of(spec)), Trainer(server_of(spec))
    assert old.rows(0)
    assert new.rows(0)
    new.weights(1, 0, 0, from_step=9)
    with pytest.raises(FolderLost, match=r"server 'mixed'.*belongs to server 'mixed'"):
        old.weights(0, 1, 0, from_step=9)
    assert len(FeedbackLog(f"{spec.journal}/feedback").decisions()) == 1


def test_a_collator_makes_a_step_by_the_decisions_that_the_server_admits_it_with(
    uris: list[str], tmp_path: Path
) -> None:
    spec = mixed_spec(uris, tmp_path)
    trainer = Trainer(server_of(spec))
    collator = Collator(spec.model_dump_json())

    def made(step: int) -> list[list[int]]:
        info: Any = collator.make(
            trainer.server.admit(trainer.lease.fence, step), (Role(1),), Part(0, 0), TRAIN
        )[0]
        return [mini.row_ids.tolist() for mini in info.mini_batches]

    assert made(2) == trainer.rows(2)
    before = made(9)
    trainer.weights(0, 0, 1, from_step=9)
    assert made(9) == trainer.rows(9) != before


def test_the_file_of_a_decision_says_what_it_does(uris: list[str], tmp_path: Path) -> None:
    trainer = Trainer(server_of(mixed_spec(uris, tmp_path)))
    trainer.decide(Request("mine", 7, {"a": 1, "b": 0, "c": 3}))
    (path,) = (tmp_path / "feedback" / "decisions").iterdir()
    record = json.loads(path.read_text())
    assert path.name == "000000000000.json"
    assert {name: record[name] for name in ("call", "from_step", "weights", "skip_rows", "version")} == {
        "call": "mine",
        "from_step": 7,
        "weights": {"a": 1.0, "b": 0.0, "c": 3.0},
        "skip_rows": [],
        "version": 2,
    }
    shutil.rmtree(tmp_path / "feedback")
