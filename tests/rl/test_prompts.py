"""A stream of prompts: each one of each epoch is trained once, or listed with the reason, whatever happens to producers and server."""

from __future__ import annotations

import heapq
import json
import os
import shutil
import signal
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.actors.rollouts import group_history
from raysvc.actors.rollouts.group_log import Spool
from raysvc.actors.rollouts.group_pool import Pool
from raysvc.actors.rollouts.group_store import GroupStore
from raysvc.actors.rollouts.prompts.prompt_book import position_of
from raysvc.actors.rollouts.prompts.prompt_desk import PromptRules
from raysvc.errors import ConfigError, PromptsEnded, SourceError
from raysvc.rl.group import Group
from raysvc.rl.group_table import late_table, table_of
from raysvc.rl.schema import Schema

TOTAL, TTL_S, LIMIT_S = 24, 10.0, 25.0


def uid_at(position: int) -> str | None:
    """Every seventh position is a hole, like a row that was dropped."""
    return None if position % 7 == 3 else f"{position}/0:0:{position % 8}"


class Source:
    """A stream of so many positions."""

    def __init__(self, total: int, uid_at: Callable[[int], str | None], identity: str = "one") -> None:
        self.total, self.uid_at, self.identity = total, uid_at, identity


class Died(Exception):
    """The server was killed."""


class MortalStore:
    """A store whose process is killed at a write: before it, or when it is done."""

    def __init__(self, store: Any) -> None:
        self._store, self.writes_left, self.is_done = store, -1, False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        return self._mortal(method) if name in ("write", "create", "delete") else method

    def _mortal(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def write(*args: Any, **kwargs: Any) -> Any:
            self.writes_left -= 1
            if self.writes_left == 0 and not self.is_done:
                raise Died
            result = method(*args, **kwargs)
            if self.writes_left == 0:
                raise Died
            return result

        return write


class Bench:
    """A store with a clock of its own, opened again from its folder at will."""

    def __init__(
        self,
        folder: Path,
        *,
        batch_size: int = 3,
        staleness: int | None = 1,
        ttl_s: float = TTL_S,
        late: tuple[str, ...] = (),
        drop_constant: str | None = None,
        short_tail: bool = True,
        **rules: Any,
    ) -> None:
        self.folder, self.now_s, self.frontier = folder, 0.0, 0
        self.batch_size, self.staleness, self.ttl_s = batch_size, staleness, ttl_s
        wanted = {
            "source": Source(TOTAL, uid_at),
            "on_stale": "pace",
            "max_prompt_s": LIMIT_S,
            "max_attempts": 3,
        }
        self.rules = PromptRules(**{**wanted, **rules})
        self.late, self.drop_constant, self.short_tail = late, drop_constant, short_tail
        self.forgotten: list[str] = []  # trained in steps that were forgotten
        self.asks: dict[str, int] = {}
        self.lives: dict[str, int] = {}
        self.open()

    def open(self) -> None:
        pool = Pool(self.batch_size, self.staleness)
        policy = self.rules and self.rules.on_stale
        pool.paced, pool.evicts, pool.withholds = policy == "pace", policy != "train", policy == "withhold"
        spool = Spool(str(self.folder), {})
        self.mortal = MortalStore(spool._store)
        spool._store = self.mortal  # type: ignore[assignment]
        self.store = GroupStore(
            pool,
            Schema(("input_ids",), self.late),
            spool,
            self.ttl_s,
            lambda: self.now_s,
            self.rules,
            self.drop_constant,
            self.short_tail,
        )

    @property
    def book(self) -> Any:
        return self.store.desk.book

    def call(self, what: Callable[[], Any]) -> Any:
        """As Ray calls a server that may be killed: what was not answered is asked again."""
        try:
            return what()
        except Died:
            self.open()
            return what()

    def ask(self, owner: str, count: int = 1) -> list[tuple[str, int]]:
        number = self.asks.get(owner, 0)
        self.asks[owner] = number + 1
        return self.ask_again(owner, number, count)

    def ask_again(self, owner: str, number: int, count: int = 1) -> list[tuple[str, int]]:
        """As Ray repeats a call."""
        life = f"{self.lives.get(owner, 0)}.{number}"
        told = self.call(lambda: self.store.hand_out(owner, life, count, self.frontier, is_first=number == 0))
        return [each[:2] for each in told]

    def restart(self, owner: str) -> None:
        """A producer of that name starts again."""
        self.lives[owner] = self.lives.get(owner, 0) + 1
        self.asks.pop(owner, None)

    def put(self, uid: str, attempt: int, owner: str, version: int | None = None) -> str:
        own = self.store.pool.version if version is None else version
        versions = [max(0, own - position_of(uid) % 3), own]  # the first sequence began earlier
        group = Group(
            uid, [[1, 2], [1, 3]], [[0, 1]] * 2, attempt=attempt,
            weight_version=versions if self.store.pool.withholds else own,
        )  # fmt: skip
        result = self.call(lambda: self.store.put(table_of([group]), owner, gate=self.frontier))
        # it waits while there is no capacity, which its prompt had until it was taken back
        assert result is not None or uid in self.book.back
        return "full" if result is None else result.verdicts[uid]

    def train(self) -> bool:
        """The next step, if it can be made."""
        if not self.call(lambda: self.store.form(self.frontier, self.frontier)):
            return False
        self.frontier += 1
        self.call(lambda: self.store.set_version(self.frontier, self.frontier))
        return True

    def rewind(self, step: int) -> None:
        self.call(lambda: self.store.rewind(step, self.frontier))
        self.frontier = step

    def forget(self, step: int) -> None:
        pool = self.store.pool
        below = [key for number, keys in pool.steps.items() if number < step for key in keys]
        gone = [key[0] for key in below if key not in pool.quarantined]
        self.call(lambda: self.store.forget_below(step))
        self.forgotten += gone

    def trained(self) -> list[str]:
        """Prompts of all steps; those of a step that was committed were trained."""
        pool = self.store.pool
        there = [key for keys in pool.steps.values() for key in keys if key not in pool.quarantined]
        return [*self.forgotten, *(uid for uid, _ in there)]

    def check(self) -> None:
        """Every prompt that was handed out is in one place."""
        pool, book = self.store.pool, self.book
        planned = Counter(self.trained())
        assert all(count == 1 for count in planned.values()), "a prompt was trained twice"
        kept = (
            Counter(planned)
            + Counter(group.key[0] for group in pool.ready)
            + Counter(uid for uid, _ in pool.waiting)
        )
        for position in range(book.next):
            if (uid := uid_at(position)) is None:
                continue
            places = [uid in book.out, uid in book.back, uid in book.lost, kept[uid] == 1]
            assert sum(places) == 1, (uid, places)
            assert kept[uid] <= 1
        assert set(book.out) == set(pool.reserved)


ACTIONS = (
    "ask",
    "ask",
    "put",
    "put",
    "put",
    "late",
    "train",
    "train",
    "sleep",
    "die",
    "release",
    "drop",
    "restart",
    "rewind",
    "again",
    "forget",
    "spoil",
    "ahead",
    "kill",
    "kill",
)


@settings(max_examples=300, deadline=None)
@given(
    data=st.data(),
    policy=st.sampled_from(["pace", "reissue", "drop", "withhold", "train"]),
    staleness=st.integers(0, 2),
    snapshot_every=st.sampled_from([1, 2, 5, 1000]),
)
def test_every_prompt_is_trained_once_or_listed_with_its_reason(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    policy: str,
    staleness: int,
    snapshot_every: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_history, "SNAPSHOT_EVERY", snapshot_every)
        live_through(Bench(tmp_path_factory.mktemp("spool"), on_stale=policy, staleness=staleness), data)


def live_through(bench: Bench, data: st.DataObject) -> None:
    """A random history; then a new producer finishes the stream."""
    held: dict[str, list[tuple[str, int, int]]] = {"a": [], "b": []}
    past: list[tuple[str, int]] = []
    for _ in range(data.draw(st.integers(5, 60))):
        action, owner = data.draw(st.sampled_from(ACTIONS)), data.draw(st.sampled_from(["a", "b"]))
        mine = held[owner]
        if action == "ask":
            found = bench.ask(owner, data.draw(st.integers(1, 3)))
            mine += [(uid, attempt, bench.store.pool.version) for uid, attempt in found]
        elif action == "again":  # Ray repeats a call that was not answered
            number = bench.asks.get(owner, 0) - data.draw(st.integers(1, 3))  # of several threads
            if number > 0 or (number == 0 and bench.asks[owner] == 1):
                told, again = bench.ask_again(owner, number, 3), bench.ask_again(owner, number, 3)
                assert told == again
                known = [each[:2] for each in mine]
                mine += [(*each, bench.store.pool.version) for each in told if each not in known]
        elif action == "put" and mine:
            uid, attempt, version = mine.pop(data.draw(st.integers(0, len(mine) - 1)))
            bench.put(uid, attempt, owner, version)
            past.append((uid, attempt))
        elif action == "late" and past:
            bench.put(*data.draw(st.sampled_from(past)), owner)
        elif action == "train":
            bench.train()
        elif action == "sleep":
            bench.now_s += data.draw(st.sampled_from([1.0, TTL_S - 1, LIMIT_S]))
            for each in data.draw(st.lists(st.sampled_from(["a", "b"]), unique=True)):
                bench.call(lambda each=each: bench.store.renew(each))
        elif action == "die":  # what it was given comes late, from the network
            past += [(uid, attempt) for uid, attempt, _ in mine]
            mine.clear()
            bench.restart(owner)
        elif action == "release" and mine:
            given_up = mine.pop()[0]
            bench.call(lambda given_up=given_up: bench.store.release([given_up]))
        elif action == "drop" and bench.store.pool.ready:
            unwanted = bench.store.pool.ready[0].key[0]
            bench.call(lambda unwanted=unwanted: bench.store.drop([unwanted]))
        elif action == "kill":  # in the middle of one of the next calls
            bench.mortal.writes_left = data.draw(st.integers(1, 4))
            bench.mortal.is_done = data.draw(st.booleans())
        elif action == "restart":
            is_written = data.draw(st.booleans())  # else what nobody was told yet may be lost
            bench.mortal.writes_left = -1
            if is_written:
                bench.store._history.wait(bench.store._history.last)
            before = bench.book.to_json()
            bench.open()
            if is_written:
                assert {**bench.book.to_json(), "asks": 0} == {**before, "asks": 0}
        elif action == "rewind" and bench.frontier:
            bench.rewind(data.draw(st.integers(bench.store.pool.kept_from, bench.frontier)))
        elif action == "ahead":  # the trainer asks for steps while it trains another
            for step in range(bench.frontier, bench.frontier + 3):
                bench.call(lambda step=step: bench.store.form(step, bench.frontier))
        elif action == "spoil":  # groups of a step that was formed and not trained cannot be collated
            pool = bench.store.pool
            steps = [step for step in pool.steps if step >= bench.frontier] or [bench.frontier]
            step = data.draw(st.sampled_from(steps))
            good = [key for key in pool.steps.get(step, ()) if key not in pool.quarantined]
            bad = data.draw(st.integers(0, len(good)))
            if bad:
                spoilt = dict.fromkeys(good[:bad], "spoilt")
                bench.call(lambda spoilt=spoilt: bench.store.quarantine(spoilt))
        elif action == "forget":
            bench.forget(data.draw(st.integers(0, bench.frontier)))
        bench.check()
    # all producers are gone; a new one finishes the stream
    bench.now_s += 10 * LIMIT_S
    for _ in range(20 * TOTAL):
        bench.now_s += 1.0  # a server that starts again gives every producer its time anew
        for uid, attempt in bench.ask("c", 3):
            assert bench.put(uid, attempt, "c") in ("new", "known", "stale")
        goes_on = bench.train()
        bench.check()
        if not goes_on and bench.store.desk.is_ended:
            break
    assert bench.store.desk.is_ended
    assert not bench.store.pool.ready, "the last step is short"
    assert max(bench.store.pool.steps, default=-1) < bench.frontier, "each step was taken"
    assert {*bench.trained(), *bench.book.lost} == {
        uid for uid in map(uid_at, range(TOTAL)) if uid is not None
    }


def test_a_prompt_of_a_dead_producer_goes_to_another_and_what_comes_late_is_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    [(uid, attempt)] = bench.ask("a")
    assert (uid, attempt) == ("0/0:0:0", 0)
    bench.now_s += TTL_S + 1
    assert bench.ask("b") == [(uid, 1)]
    assert bench.put(uid, 0, "a") == "superseded"
    assert bench.put(uid, 1, "b") == "new"
    assert bench.put(uid, 1, "b") == "known"
    with pytest.raises(SourceError, match="no prompt that this server handed out"):
        bench.put("17/0:0:1", 0, "b")
    for forged in ("mine", "0/0:0:1", "0/mine"):
        with pytest.raises(SourceError, match="no prompt that this server handed out"):
            bench.put(forged, 0, "b")


def test_a_late_put_counts_as_long_as_nobody_else_has_the_prompt(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    [(uid, _)] = bench.ask("a")
    bench.now_s += TTL_S + 1
    bench.store.renew("b")
    assert bench.book.back == {uid: 1}
    assert bench.put(uid, 0, "a") == "new"
    assert bench.ask("b") == [("1/0:0:1", 0)], "it is not handed out again"


def test_a_hung_producer_loses_its_prompt_and_a_prompt_that_nobody_can_do_is_given_up(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_attempts=2)
    for owner, attempt in (("a", 0), ("b", 1)):
        assert bench.ask(owner) == [("0/0:0:0", attempt)]
        for _ in range(4):  # it gives signs of life all the time
            bench.now_s += TTL_S - 1
            bench.store.renew(owner)
    assert bench.book.lost == {"0/0:0:0": "took too long"}
    assert bench.put("0/0:0:0", 1, "b") == "superseded"


def test_a_producer_that_starts_again_under_its_name_goes_on_with_what_it_had(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    first = [*bench.ask("a", 2), *bench.ask("a")]
    bench.restart("a")
    bench.open()
    assert bench.ask("a", 1) == first
    assert bench.ask("a", 1) == [("4/0:0:4", 0)]


def test_nothing_is_handed_out_between_a_commit_and_its_version_that_the_present_weights_are_too_old_for(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, staleness=0)
    for uid, attempt in bench.ask("a", 3):
        bench.put(uid, attempt, "a")
    assert bench.store.form(0, 0)
    bench.frontier = 1  # committed, and the new weights are not told yet
    assert bench.store.pool.capacity(bench.frontier) == 3
    assert bench.ask("a", 3) == []
    bench.store.set_version(1, 1)
    assert len(bench.ask("a", 3)) == 3


def test_a_prompt_of_a_step_that_was_forgotten_is_not_handed_out_again_by_a_server_that_starts_again(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path)
    for uid, attempt in bench.ask("a", 3):
        bench.put(uid, attempt, "a")
    assert bench.train()
    bench.forget(1)
    bench.open()
    assert bench.trained() == ["0/0:0:0", "1/0:0:1", "2/0:0:2"]
    assert not bench.book.out
    assert not bench.store.pool.reserved
    bench.now_s += TTL_S + 1
    assert bench.ask("b", 3)[0] == ("4/0:0:4", 0)
    bench.check()


@pytest.mark.parametrize("policy", ["pace", "reissue", "drop"])
def test_another_prompt_comes_in_the_place_of_a_bad_group_though_each_step_is_trained_by_fresh_weights(
    tmp_path: Path, policy: str
) -> None:
    bench = Bench(tmp_path, staleness=0, on_stale=policy)
    for uid, attempt in bench.ask("a", 3):
        bench.put(uid, attempt, "a")
    assert bench.store.form(0, 0)
    bench.store.quarantine({("1/0:0:1", 0): "bad"})
    assert not bench.train(), "a slot is empty"
    [(uid, attempt)] = bench.ask("a", 3)
    assert bench.put(uid, attempt, "a") == "new"
    assert bench.train()
    assert bench.trained() == ["0/0:0:0", uid, "2/0:0:2"]
    bench.check()
    bench.forget(1)
    assert bench.store.pool.trained(1) == 3


def test_a_server_that_was_killed_has_room_though_it_knows_of_fewer_commits(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for _ in range(2):
        for uid, attempt in bench.ask("a", 3):
            bench.put(uid, attempt, "a")
        assert bench.train()
    bench.open()
    bench.frontier = 0  # what it has kept; the trainer is at 2, and said so with its weights
    assert len(bench.ask("a", 3)) == 3


def test_a_step_goes_on_without_a_bad_group_where_no_other_will_come(tmp_path: Path) -> None:
    bench = Bench(tmp_path, source=Source(6, lambda position: f"{position}/0:0:{position}"))
    for _ in range(2):
        for uid, attempt in bench.ask("a", 3):
            bench.put(uid, attempt, "a")
        assert bench.store.form(bench.frontier, bench.frontier)
        bench.store.quarantine({(bench.store.pool.steps[bench.frontier][1][0], 0): "bad"})
        if bench.frontier == 0:
            assert not bench.train(), "three more prompts are to come"
            [(uid, attempt), *more] = bench.ask("b", 3)
            bench.put(uid, attempt, "b")
            for each in more:
                bench.put(*each, "b")
        assert bench.train()
    assert bench.store.desk.is_ended
    assert len(bench.trained()) + len(bench.book.lost) == 6
    assert not bench.train()


def test_a_step_without_any_good_group_passes_where_another_one_follows(tmp_path: Path) -> None:
    bench = Bench(tmp_path, source=Source(6, lambda position: f"{position}/0:0:{position}"))
    for uid, attempt in bench.ask("a", 6):
        bench.put(uid, attempt, "a")
    assert all(bench.store.form(step, 0) for step in (0, 1))
    bench.store.quarantine(dict.fromkeys(bench.store.pool.steps[0], "bad"))
    bench.open()
    assert bench.train()
    assert bench.store.pool.trained(1) == 0
    assert bench.train()
    assert not bench.train(), "the prompts have ended"
    assert sorted(bench.trained()) == sorted({f"{n}/0:0:{n}" for n in range(6)} - bench.book.lost.keys())
    assert bench.store.pool.trained(2) == 3
    bench.forget(1)
    bench.open()
    assert bench.store.pool.trained(2) == 3


@pytest.mark.parametrize("policy", ["pace", "reissue", "withhold"])
def test_a_bad_group_is_replaced_after_a_rewind_though_the_steps_that_are_kept_are_more_than_the_bound(
    tmp_path: Path, policy: str
) -> None:
    bench = Bench(tmp_path, staleness=1, on_stale=policy)
    for _ in range(4):
        while not bench.train():
            for uid, attempt in bench.ask("a", 3):
                bench.put(uid, attempt, "a")
    bench.rewind(0)
    bench.store.quarantine({bench.store.pool.steps[0][0]: "bad"})
    assert not bench.train(), "a slot is empty"
    for uid, attempt in bench.ask("a", 3):
        assert bench.put(uid, attempt, "a") == "new"
    assert bench.train()
    assert len(bench.store.pool.steps[0]) == 3


def test_a_put_that_is_stale_ends_its_reservation_for_a_server_that_starts_again_too(tmp_path: Path) -> None:
    bench = Bench(tmp_path, staleness=0, on_stale="reissue", max_prompt_s=None)
    [(slow, attempt)] = bench.ask("a")
    for _ in range(2):
        for each in bench.ask("b", 3 - len(bench.store.pool.ready)):
            bench.put(*each, "b")
        bench.store.set_version(bench.store.pool.version + 1, bench.frontier)
    assert bench.put(slow, attempt, "a", 0) == "stale"
    bench.store._history.wait(bench.store._history.last)
    bench.open()
    assert slow not in bench.store.pool.reserved
    assert (slow, 1) in bench.ask("b", 3)
    bench.check()


def test_a_prompt_whose_late_put_was_trained_is_not_handed_out_again_though_its_rows_are_lost(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, batch_size=1)
    [(uid, attempt)] = bench.ask("a")
    bench.now_s += TTL_S + 1
    bench.store.renew("b")
    assert bench.book.back == {uid: 1}
    assert bench.put(uid, attempt, "a") == "new"
    assert bench.train()
    for path in (tmp_path / "groups").iterdir():
        path.unlink()
    bench.open()
    assert not bench.book.back
    assert uid not in [each for each, _ in bench.ask("b", 2)]


def test_a_full_step_behind_one_with_a_bad_group_is_trained_where_a_short_tail_is_left_out(
    tmp_path: Path,
) -> None:
    source = Source(6, lambda position: f"{position}/0:0:{position}")
    bench = Bench(tmp_path, source=source, short_tail=False)
    for uid, attempt in bench.ask("a", 6):
        bench.put(uid, attempt, "a")
    assert all(bench.store.form(step, 0) for step in (0, 1))
    bench.store.quarantine({bench.store.pool.steps[0][0]: "bad"})
    assert bench.train()
    assert bench.train()
    assert len(bench.trained()) == 5


def test_what_is_withheld_of_a_step_stays_so_when_a_bad_group_of_it_is_replaced(tmp_path: Path) -> None:
    bench = Bench(tmp_path, staleness=1, on_stale="withhold", max_prompt_s=None)
    bench.store.set_version(2, 0)
    for uid, attempt in bench.ask("a", 3):
        bench.put(uid, attempt, "a")
    assert bench.store.form(0, 0)
    pool = bench.store.pool
    kept = {key: pool.trained_from[key] for key in pool.steps[0][1:]}
    assert set(kept.values()) == {1}
    bad = pool.steps[0][0]
    bench.store.quarantine({bad: "bad"})
    bench.store.set_version(3, 0)
    for uid, attempt in bench.ask("a", 3):
        bench.put(uid, attempt, "a")
    for _ in range(2):
        assert bench.store.form(0, 0)
        pool = bench.store.pool
        assert {key: pool.trained_from[key] for key in kept} == kept
        assert pool.trained_from[pool.steps[0][0]] == 2
        assert pool.trained(0) == 0
        bench.open()
    bench.frontier = 1
    bench.forget(1)
    assert bench.store.pool.trained(1) == 3


@pytest.mark.parametrize("late", [False, True])
def test_a_group_that_teaches_nothing_is_dropped_though_the_server_was_killed_before_it_was(
    tmp_path: Path, late: bool
) -> None:
    bench = Bench(tmp_path, batch_size=1, drop_constant="reward", late=("reward",) if late else ())
    [(uid, _)] = bench.ask("a")
    own = np.ones(2, np.float32)
    group = Group(uid, [[1, 2], [1, 3]], [[0, 1]] * 2, rows={} if late else {"reward": own})
    bench.mortal.writes_left, bench.mortal.is_done = 1, True
    with pytest.raises(Died):
        bench.store.put(table_of([group]), "a", gate=0)
    bench.open()
    if late:
        bench.mortal.writes_left, bench.mortal.is_done = 1, True
        with pytest.raises(Died):
            bench.store.add_columns(late_table(uid, {"reward": own}))
        bench.open()
    assert not bench.train()
    assert bench.book.lost == {uid: "all have one 'reward'"}


@pytest.mark.parametrize("late", [False, True])
def test_a_prompt_whose_rows_are_lost_before_a_step_has_them_is_handed_out_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    monkeypatch.setattr(group_history, "SNAPSHOT_EVERY", 1)
    bench = Bench(tmp_path, late=("reward",) if late else ())
    bench.store.begin_prompts()
    [(uid, attempt)] = bench.ask("a")
    assert bench.put(uid, attempt, "a") == "new"
    [(other, _)] = bench.ask("a")
    for path in (tmp_path / "groups").iterdir():
        path.unlink()
    for _ in range(2):
        bench.open()
        bench.check()
    assert bench.ask("b") == [(uid, 1)]
    bench.open()
    bench.check()
    assert bench.put(uid, 1, "b") == "new"
    assert set(bench.book.out) == {other}
    bench.open()
    bench.check()


def test_a_folder_of_prompts_of_producers_hands_out_no_others(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.store.reserve(["mine"], 0, "a")
    with pytest.raises(ConfigError, match="producers brought prompts of their own"):
        bench.store.begin_prompts()


@pytest.mark.parametrize("snapshot_every", [1, 1000])
def test_prompts_of_another_job_are_not_handed_out_from_the_same_folder(
    tmp_path: Path, snapshot_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_history, "SNAPSHOT_EVERY", snapshot_every)
    bench = Bench(tmp_path)
    bench.store.begin_prompts()
    bench.ask("a")
    bench.open()
    bench.store.begin_prompts()
    bench.rules = bench.rules._replace(source=Source(TOTAL, uid_at, "another"))
    bench.open()
    with pytest.raises(ConfigError, match="others than those that were handed out from this run folder"):
        bench.store.begin_prompts()
    bench.rules = None
    bench.open()
    with pytest.raises(ConfigError, match="are not given"):
        bench.store.begin_prompts()


def test_a_group_whose_late_columns_never_come_is_given_up_after_the_limit(tmp_path: Path) -> None:
    bench = Bench(tmp_path, late=("reward",), max_attempts=2)
    for attempt in range(2):
        [(uid, told)] = bench.ask("a")
        assert (uid, told) == ("0/0:0:0", attempt)
        assert bench.put(uid, attempt, "a") == "new"
        bench.now_s += LIMIT_S + 1
        bench.check()
    bench.ask("a")
    assert bench.book.lost == {"0/0:0:0": "took too long"}
    assert not bench.store.pool.waiting


def test_a_snapshot_says_what_was_when_it_was_taken(tmp_path: Path) -> None:
    bench = Bench(tmp_path, staleness=2)
    for _ in range(2):
        for uid, attempt in bench.ask("a", 3):
            bench.put(uid, attempt, "a")
        assert bench.train()
    said = bench.store._snapshot()
    before = json.dumps(said)
    bench.rewind(1)
    bench.ask("a", 3)
    assert json.dumps(said) == before


def test_a_kill_leaves_all_that_a_call_did_or_nothing_of_it(tmp_path: Path) -> None:
    """A prompt that took too long is evicted and handed out again: two records. Another call may write in between."""
    bench = Bench(tmp_path)
    bench.ask("a", 3)
    bench.now_s += TTL_S + 1
    written: list[list[Any]] = []
    history, keep = bench.store._history, bench.store._spool.write_events
    bench.store._spool.write_events = lambda events: written.append(list(events)) or keep(events)  # type: ignore[method-assign, func-returns-value]
    append = history.append

    def interrupted(item: Any) -> int:
        ticket = append(item)
        other = threading.Thread(target=history.wait, args=(ticket,), daemon=True)
        other.start()
        other.join(0.2)
        return ticket

    history.append = interrupted  # type: ignore[method-assign]
    bench.store.renew("b")
    history.wait(history.last)
    assert [[next(iter(event)) for event in events] for events in written] == [["released", "given_back"]]


def lengths_trained(policy: str, tmp_path: Path, seed: int) -> tuple[list[float], list[float], int]:
    """Seconds of each rollout: of all that were offered, of those that were trained; and how often work was thrown away.

    Sixteen workers sample, the trainer makes a step of eight a time; durations are heavy-tailed, and go with the prompt.
    """
    total, rng = 640, np.random.default_rng(seed)
    seconds = 1.0 + rng.pareto(1.2, total) * 3.0
    seconds = np.minimum(seconds, 60.0)
    bench = Bench(
        tmp_path, batch_size=8, staleness=1, ttl_s=1e9, on_stale=policy, max_prompt_s=None,
        source=Source(total, lambda position: f"{position}/0:0:{position}"), max_attempts=10**6,
    )  # fmt: skip
    running: list[tuple[float, str, int, int]] = []
    thrown, trained_s = 0, 2.0
    free_at = 0.0
    while not bench.store.desk.is_ended or bench.store.pool.ready:
        bench.store.renew("w")
        for uid, attempt in bench.ask("w", 16 - len(running)) if len(running) < 16 else []:
            done_s = bench.now_s + seconds[position_of(uid)]
            heapq.heappush(running, (done_s, uid, attempt, bench.store.pool.version))
        if bench.now_s >= free_at and bench.train():
            free_at = bench.now_s + trained_s
            continue
        if not running and bench.now_s >= free_at:
            break
        ahead = [free_at] if bench.now_s < free_at else []
        bench.now_s = min([*ahead, *(each[0] for each in running[:1])])
        bench.store.renew("w")
        while running and running[0][0] <= bench.now_s:
            _, uid, attempt, version = heapq.heappop(running)
            thrown += bench.put(uid, attempt, "w", version) != "new"
    thrown += bench.store.pool.evicted
    return seconds.tolist(), [seconds[position_of(uid)] for uid in bench.trained()], thrown


def test_long_rollouts_are_trained_as_often_as_short_ones(tmp_path: Path) -> None:
    shares = {}
    for policy in ("pace", "drop"):
        offered, trained, thrown = lengths_trained(policy, tmp_path / policy, seed=1)
        longest = np.quantile(offered, 0.9)
        shares[policy] = np.mean(np.array(trained) >= longest) / np.mean(np.array(offered) >= longest)
        if policy == "pace":
            assert thrown == 0
            assert sorted(trained) == sorted(offered), "all of them, not a sample"
    assert shares["pace"] == 1.0
    assert shares["drop"] < 0.5, "the simulation is one where dropping is a bias"


@pytest.mark.parametrize("late", [False, True])
def test_groups_that_teach_nothing_are_dropped_and_others_are_sampled_in_their_place(
    tmp_path: Path, late: bool
) -> None:
    bench = Bench(tmp_path, batch_size=2, drop_constant="reward", late=("reward",) if late else ())
    rewards = iter([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [0.5, 0.0], [1.0, 0.0]])
    dropped = []
    while not bench.train():
        for uid, attempt in bench.ask("a"):
            own = np.array(next(rewards), np.float32)
            group = Group(
                uid, [[1, 2], [1, 3]], [[0, 1]] * 2, attempt=attempt, rows={} if late else {"reward": own}
            )
            bench.store.put(table_of([group]), "a", gate=0)
            if late:
                bench.store.add_columns(late_table(uid, {"reward": own}))
            if own[0] == own[1]:
                dropped.append(uid)
        bench.check()
    assert bench.trained() == ["1/0:0:1", "4/0:0:4"]
    assert bench.book.lost == dict.fromkeys(dropped, "all have one 'reward'")
    before = bench.book.to_json()
    bench.open()
    assert bench.book.to_json() == before
    assert not bench.store.pool.ready


def test_a_group_without_the_column_that_filters_is_refused_and_nothing_of_it_is_kept(tmp_path: Path) -> None:
    bench = Bench(tmp_path, drop_constant="reward")
    [(uid, attempt)] = bench.ask("a")
    with pytest.raises(SourceError, match="has no 'reward', which drop_constant names"):
        bench.put(uid, attempt, "a")
    assert not bench.store.pool.versions
    assert uid in bench.book.out


def test_answers_to_threads_that_asked_at_once_come_again_when_the_server_died(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    answers = [bench.ask("a") for _ in range(4)]
    bench.open()
    again = [bench.ask_again("a", number) for number in (2, 1, 3)]
    assert again == [answers[2], answers[1], answers[3]]
    assert len(bench.book.out) == 4


def test_of_a_trajectory_the_last_turn_says_whether_the_group_teaches(tmp_path: Path) -> None:
    bench = Bench(tmp_path, drop_constant="reward")
    for final in ([0.0, 1.0], [1.0, 1.0]):
        [(uid, _)] = bench.ask("a")
        reward = np.array([0.0, final[0], 0.5, final[1]], np.float32)
        rows = [[1, 2], [1, 2, 3], [1, 4], [1, 4, 5]]
        group = Group(uid, rows, [[0, 1], [0, 0, 1]] * 2, rows={"reward": reward}, trajectory=[0, 0, 1, 1])
        bench.store.put(table_of([group]), "a", gate=0)
    assert bench.book.lost == {"1/0:0:1": "all have one 'reward'"}


# -- through a server


@pytest.fixture
def prompts_of(tmp_path: Path, sample: dict[str, str]) -> Callable[..., dict[str, Any]]:
    """A job of so many prompts, each with its answer."""

    def make(count: int, **plan: Any) -> dict[str, Any]:
        rows = tmp_path / "prompts.jsonl"
        lines = [
            {"prompt": [{"role": "user", "content": f"What is {n} plus {n}?"}], "answer": str(2 * n)}
            for n in range(count)
        ]
        rows.write_text("\n".join(map(json.dumps, lines)))
        return {
            "source": {"path": str(rows), "format": "prompt", "carry": ["answer"]},
            "tokenizer": {"name": sample["tokenizer"]},
            "cache": {"root": str(tmp_path / "cache")},
            "plan": plan,
        }

    return make


@pytest.fixture
def started(tmp_path: Path, ray_session: None) -> Iterator[Callable[..., Any]]:
    import raysvc
    from raysvc.actors.launch import server_names, stop_server

    names = []

    def start(name: str, **options: Any) -> Any:
        names.append(name)
        plan = {"batch_size": 4, "columns": ("input_ids", "labels", "reward")}
        fixed = {"run_dir": str(tmp_path / name), "pad_token_id": 0, "plan": plan, "num_cpus": 0}
        return raysvc.serve_rollouts(name, **{**fixed, **options})

    yield start
    for name in set(names) & set(server_names()):
        stop_server(name)


def sampled(prompt: Any) -> Group:
    """Two answers; the reward says whether they are right."""
    answers = [[*prompt.input_ids.tolist(), 5, 6], [*prompt.input_ids.tolist(), 7]]
    length = len(prompt.input_ids)
    masks = [[0] * length + [1] * (len(each) - length) for each in answers]
    reward = np.array([float(prompt.columns["answer"]), 0.0], np.float32)
    return prompt.group(answers, masks, rows={"reward": reward})


@pytest.mark.ray
def test_producers_only_loop_over_prompts_and_every_epoch_is_trained(
    prompts_of: Callable[..., Any], started: Callable[..., Any]
) -> None:
    import ray

    import raysvc
    from raysvc.collate import read_shard

    started("stream", prompts=prompts_of(10, epochs=2, seed=3))
    epochs: list[tuple[int, str]] = []

    def produce() -> None:
        producer = raysvc.rollouts("stream")
        for prompt in producer.prompts():
            epochs.append((prompt.epoch, prompt.columns["answer"]))
            producer.put_groups(sampled(prompt))

    threads = [threading.Thread(target=produce) for _ in range(2)]
    for thread in threads:
        thread.start()
    rewards: list[float] = []
    kills = 0
    with raysvc.attach("stream", dp_size=1) as client:
        for step in client.steps():  # ends with the prompts
            for mini in step.mini_batches:
                shard = read_shard(ray.get(mini.shards[0]))
                rewards += [float(each) for each in shard.arrays["reward"] if each]
            client.commit(step.index)
            client.set_weight_version(step.index + 1)
            if step.index in (0, 2):
                os.kill(raysvc.rollouts("stream")._call("stats", "control")["pid"], signal.SIGKILL)
                kills += 1
    assert kills == 2
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "it hears that the prompts have ended"
    answers = [float(2 * n) for n in range(10) if n]
    assert sorted(rewards) == sorted([*answers, *answers])
    assert sorted(epochs) == sorted((epoch, str(2 * n)) for epoch in (0, 1) for n in range(10))
    facts = raysvc.rollouts("stream").stats()["prompts"]
    assert facts == {"handed_out": 20, "of": 20, "under_way": 0, "to_hand_out_again": 0, "lost": {}}


@pytest.mark.ray
@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_the_last_step_of_a_stream_is_short_or_left_out_and_a_server_without_prompts_hands_out_none(
    prompts_of: Callable[..., Any], started: Callable[..., Any], tail: str
) -> None:
    import ray

    import raysvc
    from raysvc.collate import read_shard

    plan = {"batch_size": 4, "columns": ("input_ids", "labels", "reward"), "tail": tail}
    started("short", prompts=prompts_of(7), plan=plan)
    producer = raysvc.rollouts("short")
    rewards: list[list[float]] = []
    asked = producer.prompts(at_once=2)
    with raysvc.attach("short", dp_size=2, look_ahead_steps=0) as client:
        thread = threading.Thread(target=lambda: [producer.put_groups(sampled(prompt)) for prompt in asked])
        thread.start()
        for step in client.steps():
            shards = [read_shard(ray.get(ref)) for mini in step.mini_batches for ref in mini.shards]
            rewards.append(sorted(float(each) for shard in shards for each in shard.arrays["reward"] if each))
            client.commit(step.index)
            client.set_weight_version(step.index + 1)
        thread.join(30)
    trained = sorted(reward for step in rewards for reward in step)  # that of prompt 0 is 0
    if tail == "pad":
        assert len(rewards) == 2
        assert trained == [2.0 * n for n in range(1, 7)]
    else:
        assert len(rewards) == 1
        assert len(trained) in (3, 4)
    assert "3 of the 4 groups of step 0 are left" in str(PromptsEnded("short", 0, 3, 4))
    started("plain")
    with pytest.raises(ConfigError, match="hands out no prompts"):
        next(raysvc.rollouts("plain").prompts())


@pytest.mark.ray
def test_a_step_whose_rows_are_all_gone_passes_and_the_next_one_is_trained(
    prompts_of: Callable[..., Any], started: Callable[..., Any], tmp_path: Path
) -> None:
    import ray

    import raysvc
    from raysvc.actors.launch import stop_server
    from raysvc.collate import read_shard

    job = prompts_of(8, shuffle="none")
    started("spoilt", prompts=job)
    producer = raysvc.rollouts("spoilt")
    with pytest.raises(ConfigError, match=r"hands out the prompts; loop over producer\.prompts"):
        producer.reserve(["mine"])
    for prompt in producer.prompts():
        producer.put_groups(sampled(prompt))
    rewards: list[list[float]] = []
    with raysvc.attach("spoilt", dp_size=1) as client:
        steps = client.steps()
        for number in range(2):
            next(steps)
            client.commit(number)
        for path in sorted((tmp_path / "spoilt" / "server" / "rollouts" / "groups").iterdir())[:4]:
            path.unlink()
        os.kill(producer._call("stats", "control")["pid"], signal.SIGKILL)
        client.rewind(0)
        for step in client.steps():
            shards = [read_shard(ray.get(mini.shards[0])) for mini in step.mini_batches]
            rewards.append(sorted(float(each) for shard in shards for each in shard.arrays["reward"] if each))
            client.commit(step.index)
    assert rewards == [[], [8.0, 10.0, 12.0, 14.0]]
    assert len(producer.stats()["quarantined"]) == 4
    assert producer.stats()["trained"] == 4
    stop_server("spoilt")
    with pytest.raises(ConfigError, match="others than those that were handed out"):
        started("spoilt", prompts=prompts_of(9))


@pytest.mark.ray
def test_prompts_are_read_with_the_credentials_of_their_job_and_nobody_keeps_these(
    prompts_of: Callable[..., Any], started: Callable[..., Any], s3_server: Any, tmp_path: Path
) -> None:
    import raysvc
    from raysvc.actors.server.kept.served_records import served_line
    from raysvc.actors.server.spec import ServeSpec

    options = {**s3_server.options, "config_kwargs": {"user_agent_extra": "hidden-thing"}}
    job = prompts_of(3, shuffle="window(2)")
    job["cache"] = {"root": f"s3://raysvc-tests/{uuid.uuid4().hex}", "storage_options": options}
    started("s3", prompts=job)  # its run folder is local, and needs no options
    producer = raysvc.rollouts("s3")
    assert next(producer.prompts(at_once=3)).columns["answer"] in ("0", "2", "4")
    text, _ = producer._call("spec_json", "control")
    spec = ServeSpec.model_validate_json(text)
    assert "hidden-thing" in text, "the server itself needs them"
    assert "hidden-thing" not in json.dumps(served_line(0, 1, spec))
    assert "hidden-thing" not in repr(spec)
    other = spec.model_copy(
        update={"rollouts": spec.rollouts and spec.rollouts.model_copy(update={"wait_s": 1.0})}
    )
    assert "hidden-thing" not in str(spec.difference(other))
    kept = [
        each.read_text() for each in (tmp_path / "s3").rglob("*") if each.is_file() and each.suffix == ".json"
    ]
    assert kept
    assert not any("hidden-thing" in each for each in kept)


@pytest.mark.ray
def test_a_step_is_made_again_where_the_entry_of_its_prompts_is_gone(
    prompts_of: Callable[..., Any], started: Callable[..., Any], tmp_path: Path
) -> None:
    import raysvc
    from raysvc.actors.launch import stop_server
    from raysvc.inspect.replay_run import replay_run

    started("gone", prompts=prompts_of(4))
    producer = raysvc.rollouts("gone")
    for prompt in producer.prompts():
        producer.put_groups(sampled(prompt))
    with raysvc.attach("gone", dp_size=1) as client:
        for step in client.steps():
            client.commit(step.index)
    stop_server("gone")
    shutil.rmtree(tmp_path / "cache")
    [shard] = replay_run(str(tmp_path / "gone"), 0, dp_size=1).chosen()
    assert len(shard.row_ids) == 8


def test_what_would_be_left_unread_is_refused_before_anything_starts(prompts_of: Callable[..., Any]) -> None:
    import raysvc

    fixed = {"run_dir": "unused", "pad_token_id": 0, "plan": {"batch_size": 2}}
    for name, value in (
        ("on_stale", "pace"),
        ("on_stale", "reissue"),
        ("max_prompt_s", 5.0),
        ("max_attempts", 1),
    ):
        with pytest.raises(
            ConfigError, match=rf"serve_rollouts\({name}.*\): is about prompts, and there are none"
        ):
            raysvc.serve_rollouts("refused", **fixed, **{name: value})
    job = prompts_of(3)
    job["source"]["follow"] = True
    job["plan"] = {"shuffle": "window"}
    with pytest.raises(ConfigError, match=r"source\.follow"):
        raysvc.serve_rollouts("refused", **fixed, prompts=job)
    with pytest.raises(ConfigError, match=r"plan\.order"):
        raysvc.serve_rollouts("refused", **fixed, prompts={**prompts_of(3), "plan": {"order": "here:f"}})
