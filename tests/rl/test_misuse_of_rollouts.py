"""What producers get wrong, and who serves rollouts: a typed error that names the argument, before anything is taken."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

NAN = float("nan")
SERVED: list[tuple[str, Any]] = [
    *[("name", wrong) for wrong in (3, None, "", "a b/", b"x")],
    *[("run_dir", wrong) for wrong in (3, None, "")],
    *[("pad_token_id", wrong) for wrong in ("0", 1.5, -1, None, True)],
    *[("plan", wrong) for wrong in (None, [1], "batch_size")],
    *[("max_staleness", wrong) for wrong in (-1, 1.5, "1")],
    *[("wait_s", wrong) for wrong in (-1, "x", NAN, None)],
    *[("late", wrong) for wrong in ("reward", [3], [""], 3)],
    *[("defaults", wrong) for wrong in ([1], {"a": "x"}, {3: 1.0}, {"a": NAN})],
    *[("on_bad_group", wrong) for wrong in ("skip", None)],
    *[("producer_ttl_s", wrong) for wrong in (0, "x", NAN)],
    *[("lease_ttl_s", wrong) for wrong in (-3, 0, NAN)],
    *[("num_cpus", wrong) for wrong in (-1, "many")],
    *[("storage_options", wrong) for wrong in ([1], "key")],
    *[("placement", wrong) for wrong in ("moon", None)],
    *[("detached", wrong) for wrong in ("no", None, 1)],
    *[("wait_for_nodes", wrong) for wrong in ("no", None, 1)],
    *[("address", wrong) for wrong in (3, "")],
]


@pytest.mark.parametrize(("argument", "wrong"), SERVED, ids=str)
def test_a_wrong_argument_of_serve_rollouts_is_named(argument: str, wrong: Any, tmp_path: Path) -> None:
    import raysvc
    from raysvc.errors import ConfigError

    good: dict[str, Any] = {
        "name": "m",
        "run_dir": str(tmp_path),
        "pad_token_id": 0,
        "plan": {"batch_size": 2},
    }
    with pytest.raises(ConfigError, match=rf"serve_rollouts\({argument}"):
        raysvc.serve_rollouts(**{**good, argument: wrong})


@pytest.mark.parametrize(
    ("plan", "law"), [({"batch_size": 0}, "plan.batch_size"), ({"batch": 1}, "plan.batch")]
)
def test_a_plan_that_cannot_be_is_refused_by_its_key(plan: Any, law: str, tmp_path: Path) -> None:
    import raysvc
    from raysvc.errors import ConfigError

    with pytest.raises(ConfigError, match=law):
        raysvc.serve_rollouts("m", run_dir=str(tmp_path), pad_token_id=0, plan=plan)


@pytest.mark.parametrize("call", ["detached", "address"])
def test_serve_refuses_a_flag_that_is_none(call: str) -> None:
    import raysvc
    from raysvc.errors import ConfigError

    with pytest.raises(ConfigError, match=rf"serve\({call}\)"):
        raysvc.serve({}, **{call: 3})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def producer(tmp_path_factory: pytest.TempPathFactory, ray_session: None) -> Iterator[Any]:
    import raysvc
    from raysvc.actors.launch import stop_server

    folder = str(tmp_path_factory.mktemp("run"))
    plan = {"batch_size": 2}
    raysvc.serve_rollouts("misused-rl", run_dir=folder, pad_token_id=0, plan=plan, late=["r"], num_cpus=0)
    yield raysvc.rollouts("misused-rl")
    stop_server("misused-rl")


@pytest.mark.ray
def test_calls_of_a_producer_refuse_wrong_types_and_take_nothing(producer: Any) -> None:
    import raysvc
    from raysvc.errors import ConfigError, SourceError

    before = producer.stats()
    for method in ("reserve", "release", "drop", "close_groups"):
        for wrong in ("abc", None, 3, [3], [None], b"x", {"a": 1}, [["a"]], [""]):
            with pytest.raises(ConfigError, match=rf"{method}\(uids\)"):
                getattr(producer, method)(wrong)
    calls: dict[str, Callable[[], Any]] = {
        r"add_columns\(uid\)": lambda: producer.add_columns(3, {"r": [1.0]}),
        r"add_columns\(columns\)": lambda: producer.add_columns("u", [1]),
        r"add_columns\(columns\) key": lambda: producer.add_columns("u", {3: [1.0]}),
        r"add_columns\(rows\)": lambda: producer.add_columns("u", {"r": [1.0]}, rows="0"),
        r"add_columns\(rows\)\[0\]": lambda: producer.add_columns("u", {"r": [1.0]}, rows=[0.5]),
        r"close_groups\(attempt\)": lambda: producer.close_groups(["a"], attempt=1.5),
        r"put_groups\(wait_s\)": lambda: producer.put_groups([], wait_s="x"),
        r"put_groups\(groups\)": lambda: producer.put_groups("abc"),
        r"rollouts\(owner\)": lambda: raysvc.rollouts("misused-rl", owner=3),  # type: ignore[arg-type]
        r"rollouts\(address\)": lambda: raysvc.rollouts("misused-rl", address=3),  # type: ignore[arg-type]
    }
    for law, call in calls.items():
        with pytest.raises(ConfigError, match=law):
            call()
    for columns in ({}, {"r": 3.0}, {"r": ["x"]}, {"r": []}):
        with pytest.raises(SourceError, match="group 'u'"):
            producer.add_columns("u", columns)
    for items in ([3], [None], ["a"]):
        with pytest.raises(SourceError, match="put_groups"):
            producer.put_groups(items)
    assert producer.stats() == before


def test_the_trainer_of_rollouts_refuses_wrong_versions(producer: Any) -> None:
    import raysvc
    from raysvc.errors import ConfigError, StepOutOfOrder

    with raysvc.attach("misused-rl") as client:
        for wrong in ("1", 1.0, None, True, -1):
            with pytest.raises(ConfigError, match=r"set_weight_version"):
                client.rollouts.set_weight_version(wrong)
            with pytest.raises(ConfigError, match=r"delete_before"):
                client.rollouts.delete_before(wrong)
        with pytest.raises(StepOutOfOrder):
            client.rollouts.delete_before(1)


def test_a_producer_that_was_forked_is_refused_and_its_parent_goes_on(producer: Any) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            producer.reserve(["forked"])
            said = "went on"
        except BaseException as error:  # noqa: BLE001 - the parent looks at it
            said = f"{type(error).__name__} {'forked' in str(error)}"
        os.write(writing, said.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 1000).decode() == "ServerError True"
    assert producer.stats()["reserved"] == 0


def test_a_producer_that_was_closed_gives_signs_of_life_again_when_it_reserves(producer: Any) -> None:
    def living() -> int:
        return sum(each.name == "raysvc-producer-misused-rl" for each in threading.enumerate())

    before = living()
    each = [threading.Thread(target=producer.reserve, args=([f"at-once-{n}"],)) for n in range(8)]
    for thread in each:
        thread.start()
    for thread in each:
        thread.join()
    assert living() == before + 1, "one thread, however many reserve at once"
    producer.close()
    producer.reserve(["again"])
    assert producer._stop is not None
    assert not producer._stop.is_set()
    producer.release([*(f"at-once-{n}" for n in range(8)), "again"])
    producer.close()
