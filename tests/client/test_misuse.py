"""What users get wrong ends in a typed error that names the argument and the law, before anything is taken."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

Served = Callable[..., Any]
NAME = "misused"
INTEGERS = ("3", 1.0, None, True, [1], float("nan"))


@pytest.fixture(scope="module")
def server(shared: Served) -> Any:
    """One server for the whole table: nothing in it takes or moves anything."""
    return shared(NAME)


def facts(server: Any) -> tuple[Any, ...]:
    from raysvc.actors.launch import wait_for

    found = wait_for(server.stats.options(concurrency_group="control").remote(), "stats")
    return tuple(found[name] for name in ("holder", "fence", "frontier"))


ATTACH: list[tuple[dict[str, Any], str]] = [
    *[({"name": wrong}, r"attach\(name\)") for wrong in (3, None, "", b"x")],
    *[({"dp_size": wrong}, r"attach\(dp_size\)") for wrong in (*INTEGERS, 0, -1)],
    *[({"locality_hints": wrong}, r"attach\(locality_hints\)") for wrong in ("node", 1, [1])],
    *[({"look_ahead_steps": wrong}, r"attach\(look_ahead_steps\)") for wrong in (*INTEGERS, -1)],
    *[({"look_ahead_bytes": wrong}, r"attach\(look_ahead_bytes\)") for wrong in ("1", 1.5, -1)],
    *[({"takeover": wrong}, r"attach\(takeover\)") for wrong in (1, "yes", None)],
    *[({"reader": wrong}, r"attach\(reader\)") for wrong in (1, None)],
    *[({"address": wrong}, r"attach\(address\)") for wrong in (1, "")],
    *[({"roles": wrong}, r"attach\(roles") for wrong in ({}, [], {"a": 0}, {"a": 1.5}, {1: 1}, {"a": "2"})],
]
ATTACH_RANK: list[tuple[dict[str, Any], str]] = [
    *[({"dp_size": 2, "rank": wrong}, r"attach_rank\(rank\)") for wrong in ("0", 1.0, True, -1, 2)],
    *[({"dp_size": wrong, "rank": 0}, r"attach_rank\(dp_size\)") for wrong in ("1", 1.5, 0)],
    *[({"group": wrong, "rank": 0}, r"attach_rank\(group\)") for wrong in (1, "")],
    *[({"columns": wrong, "rank": 0}, r"attach_rank\(columns\)") for wrong in ("labels", 3)],
    *[
        ({"look_ahead_steps": wrong, "rank": 0}, r"attach_rank\(look_ahead_steps\)")
        for wrong in (*INTEGERS, -1)
    ],
    ({"dp_size": 2}, r"attach_rank\(rank\).*missing"),
]


@pytest.mark.ray
@pytest.mark.parametrize(
    ("call", "arguments", "law"),
    [("attach", *each) for each in ATTACH] + [("attach_rank", *each) for each in ATTACH_RANK],
    ids=str,
)
def test_a_wrong_argument_of_attach_is_named_and_no_lease_is_taken(
    call: str, arguments: dict[str, Any], law: str, server: Any
) -> None:
    import raysvc
    from raysvc.errors import ConfigError

    before = facts(server)
    with pytest.raises(ConfigError, match=law):
        getattr(raysvc, call)(**{"name": NAME, **arguments})
    assert facts(server) == before


def test_calls_of_both_clients_refuse_wrong_types_and_ranges(server: Any) -> None:
    import raysvc
    from raysvc.errors import ConfigError, StateMismatch, StepOutOfOrder

    with raysvc.attach(NAME) as driver:
        for wrong in INTEGERS:
            for name, call in CALLS_WITH_A_STEP.items():
                with pytest.raises(ConfigError, match="integer"):
                    call(driver, wrong)
                assert driver.next_step == 0, name
        for wrong in (-1, 21, 10**9):
            for call in (driver.fetch, driver.outline):
                with pytest.raises(StepOutOfOrder):
                    call(wrong)
        with pytest.raises(ConfigError, match=r"commit\(step\).*at least 0"):
            driver.commit(-1)
        with pytest.raises(StepOutOfOrder):
            driver.commit(21)
        with pytest.raises(ConfigError, match=r"commit\(skipped\)"):
            driver.commit(0, skipped="no")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"steps\(stop\)"):
            driver.steps(stop=-1)
        with pytest.raises(ConfigError, match=r"steps\(on_fetch\)"):
            driver.steps(on_fetch=3)  # type: ignore[arg-type]
        good = driver.state_dict()
        odd = [{**good, key: value} for key, value in (("frontier", 1.5), ("plan", None), ("plan", {"a": 1}))]
        for wrong_state in ({}, [], None, {"version": 2}, *odd):
            with pytest.raises(StateMismatch, match="state"):
                driver.load_state_dict(wrong_state)  # type: ignore[arg-type]
        for name in ("", 3):
            with pytest.raises(ConfigError, match=r"eval\(name\)"):
                driver.eval(name)  # type: ignore[arg-type]
        for law, trackers, named in (
            ("trackers", (3,), {"folder": "never-made"}),
            ("folder", (), {"folder": 3}),
            ("name", (), {"folder": "never-made", "name": 3}),
            ("config", (), {"folder": "never-made", "config": 3}),
        ):
            with pytest.raises(ConfigError, match=rf"report_to\({law}\)"):
                driver.report_to(*trackers, **named)  # type: ignore[arg-type]
        assert not os.path.exists("never-made")
        assert next(iter(driver)).index == 0, "nothing of this broke the stream"
        driver.commit(np.int64(0))  # type: ignore[arg-type]
        assert (driver.next_step, type(driver.next_step)) == (1, int)
        driver.rewind(0)
    with raysvc.attach_rank(NAME, rank=0, group="g") as rank:
        for wrong in INTEGERS:
            with pytest.raises(ConfigError, match="integer"):
                rank.commit(wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"steps\(stop\)"):
            rank.steps(stop=1.0)  # type: ignore[arg-type]
        assert next(rank.steps()).index == 0


CALLS_WITH_A_STEP: dict[str, Callable[[Any, Any], object]] = {
    "commit": lambda client, step: client.commit(step),
    "fetch": lambda client, step: client.fetch(step),
    "outline": lambda client, step: client.outline(step),
    "rewind": lambda client, step: client.rewind(step),
}


def test_calls_for_rollouts_on_a_server_of_an_entry_say_so(server: Any) -> None:
    import raysvc
    from raysvc.errors import ServerError

    with raysvc.attach(NAME) as client:
        for call in (
            lambda: client.rollouts.set_weight_version(1),
            lambda: client.rollouts.delete_before(0),
            lambda: client.rollouts.put_groups([]),
            lambda: raysvc.rollouts(NAME),
        ):
            with pytest.raises(ServerError, match="serves an entry"):
                call()


def test_a_client_that_was_detached_says_so(server: Any) -> None:
    import raysvc
    from raysvc.errors import ServerError

    driver = raysvc.attach(NAME)
    running = iter(driver)
    next(running)
    driver.detach()
    driver.detach()
    for call in (
        lambda: driver.commit(0), lambda: driver.fetch(0), lambda: driver.outline(0), lambda: driver.rewind(0),
        lambda: driver.load_state_dict(driver.state_dict()), driver.steps, lambda: driver.eval("valid"),
        lambda: driver.rollouts.put_groups([]),
    ):  # fmt: skip
        with pytest.raises(ServerError, match="is used after detach"):
            call()
    rank = raysvc.attach_rank(NAME, rank=0, group="g")
    rank.detach()
    with pytest.raises(ServerError, match="is used after detach"):
        rank.steps()


def test_a_child_that_was_forked_is_refused_and_takes_nothing_from_its_parent(server: Any) -> None:
    import raysvc

    with raysvc.attach(NAME) as client:
        step = next(iter(client))
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            found = []
            for call in (lambda: client.commit(step.index), lambda: client.outline(0), client.detach):
                try:
                    call()
                    found.append("went on")
                except BaseException as error:  # noqa: BLE001 - the parent looks at it
                    found.append(f"{type(error).__name__} {'forked' in str(error)}")
            os.write(writing, ",".join(found).encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(reading, 1000).decode() == ",".join(["ServerError True"] * 3)
        assert client.next_step == 0
        client.commit(0)
        client.rewind(0)
    assert facts(server)[0] is None


def test_commits_from_several_threads_end_at_the_newest(server: Any) -> None:
    import raysvc

    with raysvc.attach(NAME, look_ahead_steps=4) as client:
        for _ in client.steps(stop=16):
            pass
        threads = [threading.Thread(target=client.commit, args=(step,)) for step in range(15, -1, -1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert client.next_step == 16
        client.rewind(0)


@pytest.mark.parametrize("wrong", [3, 1.5, b"x", ["job.yaml"]])
def test_a_job_of_a_wrong_type_is_refused(wrong: Any) -> None:
    import raysvc
    from raysvc.errors import ConfigError

    for call in (raysvc.tokenize, raysvc.serve, raysvc.train):
        with pytest.raises(ConfigError, match="job"):
            call(wrong)


@pytest.mark.parametrize("wrong", [3, None, b"x", ""])
def test_an_entry_that_is_no_address_is_refused(wrong: Any) -> None:
    import raysvc
    from raysvc.errors import UserMistake

    with pytest.raises(UserMistake, match=r"open_entry\(uri\)"):
        raysvc.open_entry(wrong)


@pytest.mark.parametrize("wrong", INTEGERS)
def test_a_plan_refuses_steps_and_ranks_that_are_no_integers(wrong: Any) -> None:
    from raysvc.errors import PlanError
    from raysvc.job.config import PlanConfig
    from raysvc.plan.plan import Plan

    plan = Plan(PlanConfig(batch_size=2), np.array([3, 4, 5, 6]))
    for step, dp_size in ((wrong, 1), (0, wrong), (0, 0), (0, -1)):
        with pytest.raises(PlanError, match=r"step|dp_size"):
            plan.step(step, dp_size)


@pytest.mark.ray
def test_a_run_that_never_commits_is_warned_once(
    serve: Served, entry: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    import raysvc

    serve("no-commits", sources=[entry(50)], plan={"epochs": 30})
    with raysvc.attach("no-commits", look_ahead_steps=8) as client:
        for _ in client.steps(stop=150):
            pass
    (said,) = [each.message for each in caplog.records if "no commit" in each.message]
    assert "call commit(step.index)" in said
