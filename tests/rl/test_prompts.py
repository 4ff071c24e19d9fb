"""What becomes of prompts that producers, trainers and files fail, one by one."""

from __future__ import annotations

import heapq
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysvc.actors.rollouts import group_history
from raysvc.actors.rollouts.prompts.prompt_book import position_of
from raysvc.errors import ConfigError, SourceError
from raysvc.rl.group import Group
from raysvc.rl.group_table import late_table, table_of

from .prompt_bench import LIMIT_S, TOTAL, TTL_S, Bench, Died, Source, uid_at


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
