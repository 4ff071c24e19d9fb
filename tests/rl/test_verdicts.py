"""What producers and trainers hear of each prompt: verdicts, states, and whom a step waits for."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from raysvc.actors.rollouts.rollout_stream import RolloutStream
from raysvc.actors.server.make_step import Recipe
from raysvc.actors.server.spec import RolloutSpec
from raysvc.client.batch_client import _hear
from raysvc.errors import StepNotReady
from raysvc.job.config import PlanConfig
from raysvc.rl.group import Group
from raysvc.rl.group_table import late_table, table_of


def group(uid: str, **fields: Any) -> Group:
    return Group(uid, [[1, 7, 2], [1, 8, 3]], [[0, 1, 1]] * 2, **fields)


@pytest.fixture
def stream(tmp_path: Path) -> Callable[..., RolloutStream]:
    """A stream of two groups a step, opened from the same folder whenever it is called; its clock stands still."""

    def start(now_s: float = 0.0, **spec: Any) -> RolloutStream:
        plan = PlanConfig(batch_size=2, columns=("input_ids", "labels"))
        made = RolloutStream(
            "rl", RolloutSpec(**{"max_staleness": 1, **spec}), Recipe(plan, 0), str(tmp_path), {}
        )
        made.store._now_s = lambda: now_s
        return made

    return start


def said(one: RolloutStream, *groups: Group, gate: int = 0) -> dict[str, str]:
    result = one.put(table_of(groups), "me", gate=gate)
    assert result is not None
    return result.verdicts


def states(one: RolloutStream, uids: str, frontier: int = 0) -> dict[str, str]:
    return {uid: each.state for uid, each in one.store.status(uids.split(), frontier).items()}


def test_a_prompt_that_was_put_is_granted_under_another_attempt_only(stream: Any) -> None:
    one = stream(max_staleness=9)
    assert said(one, group("a"), group("b"), group("c")) == {"a": "new", "b": "new", "c": "new"}
    assert one.form(0, 0)
    one.store.drop(["c"])
    for again in (one, stream(max_staleness=9)):
        asked = again.store.reserve(["a", "b", "c", "d"], 1, "me")
        assert asked == {"a": "known", "b": "known", "c": "dropped", "d": "granted"}
        assert again.store.reserve(["a", "d"], 1, "other", attempt=1) == {"a": "granted", "d": "taken"}
        assert said(again, group("a"), group("c")) == {"a": "known", "c": "dropped"}
        assert said(again, group("b", attempt=2))["b"] in ("new", "known")
        assert again.store.reserve(["b"], 1, "me", attempt=2) == {"b": "known"}
        assert again.store.reserve(["b"], 1, "me", attempt=3) == {"b": "granted"}
        again.store.release(["a", "b", "d"])


def test_a_full_server_says_so_and_grants_what_there_is_room_for(stream: Any) -> None:
    one = stream(max_staleness=0)
    assert one.store.reserve(["a", "b", "c"], 0, "me") == {"a": "granted", "b": "granted", "c": "full"}
    assert one.put(table_of([group("c")]), "me", gate=0) is None


def test_a_put_that_is_too_old_is_stale_takes_no_room_and_may_come_again(stream: Any) -> None:
    one = stream()
    one.store.reserve(["old"], 0, "me")
    said(one, group("a"), group("b"))
    assert one.form(0, 0)
    one.store.set_version(1, 1)
    one.store.set_version(2, 2)
    room = one.pool.capacity(2)
    files = len(list(one.store._spool.history()))
    assert said(one, group("old"), gate=2) == {"old": "stale"}
    assert said(one, group("old"), gate=2) == {"old": "stale"}
    assert (one.pool.capacity(2), one.pool.stale, one.store.num_rows) == (room + 1, 2, 4)
    assert "old" not in one.pool.reserved
    assert [folder for folder, _ in one.store._spool.history()[files:]] == ["events"], (
        "only the release is written"
    )
    assert said(one, group("old", weight_version=1), group("older"), gate=2) == {
        "old": "new",
        "older": "stale",
    }
    assert states(one, "old older", 2) == {"old": "ready", "older": "unknown"}
    assert states(stream(), "old older", 2) == {"old": "ready", "older": "unknown"}


def test_a_stale_put_with_late_columns_leaves_nothing_and_fixes_no_schema(stream: Any) -> None:
    one = stream(late=("reward",))
    one.store.set_version(3, 0)
    assert said(one, group("a", rows={"reward": [1.0, 2.0], "other": [0.5, 0.5]})) == {"a": "stale"}
    assert not one.store.schema.types
    assert said(one, group("b", rows={"other": [1, 2]}, weight_version=3)) == {"b": "new"}
    one.store.add_columns(late_table("b", {"reward": [1.0, 2.0]}))
    assert states(one, "a b") == {"a": "unknown", "b": "ready"}


def test_the_state_of_a_prompt_follows_it_also_over_a_restart(stream: Any) -> None:
    one = stream(late=("reward",))
    one.store.reserve(["r"], 0, "me")
    assert one.store.status(["r"], 0)["r"] == ("reserved", "me", 0.0, None, None)
    said(one, group("open", closed=False), group("w"))
    assert states(one, "r open w x") == {"r": "reserved", "open": "open", "w": "waiting", "x": "unknown"}
    one.store.close([("open", 0)])
    for uid in ("open", "w"):
        one.store.add_columns(late_table(uid, {"reward": [1.0, 2.0]}))
    assert states(one, "open w") == {"open": "ready", "w": "ready"}
    assert one.form(0, 0)
    assert one.store.status(["w"], 0)["w"] == ("planned", None, None, 0, 0)
    one.store.set_version(1, 1)
    one.store.quarantine({("w", 0): "damaged"})
    said(one, group("e"))
    one.store.set_version(2, 2)
    wanted = {"open": "trained", "w": "quarantined", "e": "evicted", "r": "reserved"}
    assert states(one, "open w e r", 1) == wanted
    assert one.store.reserve(["e"], 1, "me") == {"e": "evicted"}
    assert states(stream(late=("reward",)), "open w e r", 1) == wanted
    one.store.delete_before(1)
    assert states(one, "open", 1) == {"open": "forgotten"}


def test_who_is_waited_for_is_named_the_oldest_first(stream: Any) -> None:
    one, clock = stream(max_staleness=9), [0.0]
    one.store._now_s = lambda: clock[0]
    one.store.reserve(["slow", "done"], 0, "hung")
    clock[0] = 10.0
    said(one, group("half", closed=False), group("done"))
    clock[0] = 25.0
    assert one.store.under_way() == (("slow", "reserved", "hung", 25.0), ("half", "open", "me", 15.0))
    one.store.release(["slow"])
    one.store.reserve(["slow"], 0, "other")
    assert one.store.under_way()[1] == ("slow", "reserved", "other", 0.0)


def test_the_error_names_the_oldest_prompts_and_survives_pickling() -> None:
    missing = tuple((f"p{n}", "reserved", "hung", 600.0 - n) for n in range(7))
    error = pickle.loads(pickle.dumps(StepNotReady("rl", 3, 1, 4, missing)))
    assert "1 of the 4 groups of step 3; under way: 'p0' reserved by hung for 600 s, 'p1'" in str(error)
    assert "and 2 more" in str(error)
    assert "'p5'" not in str(error)
    assert error.missing == missing
    assert "waiting for 2 s" in str(StepNotReady("rl", 3, 1, 4, (("p", "waiting", "", 2.0),)))
    assert "no prompt is reserved or open" in str(StepNotReady("rl", 3, 1, 4))


@pytest.fixture
def served(tmp_path: Path, ray_session: None) -> Iterator[str]:
    import raysvc
    from raysvc.actors.launch import stop_server

    plan = {"batch_size": 2, "columns": ("input_ids", "labels")}
    raysvc.serve_rollouts("said", run_dir=str(tmp_path), pad_token_id=0, plan=plan, wait_s=0.2, num_cpus=0)
    yield "said"
    stop_server("said")


@pytest.mark.ray
def test_producers_and_trainers_hear_it_through_ray(served: str) -> None:
    import raysvc

    producer = raysvc.rollouts(served, owner="hung")
    granted = producer.reserve(["a", "b", "c", "d", "e"])
    assert granted == ["a", "b", "c", "d"]
    assert granted.verdicts["e"] == "full"
    put = producer.put_groups([group("a"), group("a", attempt=1), group("b")])
    assert (put.new, put.known, put.verdicts) == (3, 0, {"a": "new", "b": "new"})
    assert producer.put_groups(group("a")).verdicts == {"a": "known"}
    assert producer.status(["a", "c"])["c"].owner == "hung"
    assert producer.reserve(["a", "c"], attempt=2) == ["c"]
    with raysvc.attach(served, look_ahead_steps=3) as client:
        steps = client.steps()
        client.commit(next(steps).index)
        with pytest.raises(StepNotReady, match=r"1 of the 2 .* 'c' reserved by hung for \d s, 'd' reserved"):
            next(steps)


@pytest.mark.parametrize("failed", [True, False])
def test_the_shards_of_a_step_that_failed_are_asked_for_so_that_ray_does_not_print_them(failed: bool) -> None:
    asked: list[int] = []

    class Ref:
        def __init__(self, number: int) -> None:
            self.number, self.answer = number, Future[Any]()

        def future(self) -> Future[Any]:
            asked.append(self.number)
            return self.answer

    info, *shards = (Ref(number) for number in range(3))
    _hear(info, shards)
    assert asked == [0]
    if failed:
        info.answer.set_exception(StepNotReady("rl", 3, 1, 4))
    else:
        info.answer.set_result(None)
    assert asked == ([0, 1, 2] if failed else [0])
