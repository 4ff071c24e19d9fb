"""Random histories of a stream of prompts: each one of each epoch is trained once, or listed with the reason."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.actors.rollouts import group_history

from .prompt_bench import LIMIT_S, TOTAL, TTL_S, Bench, uid_at

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
