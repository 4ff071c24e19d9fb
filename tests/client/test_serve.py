"""Life of a server: names, specs, leases, the command line."""

from __future__ import annotations

import concurrent.futures
import gc
import os
import socket
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.ray
Served = Callable[..., Any]


def call(server: Any, method: str, *args: Any, group: str = "control") -> Any:
    from raysvc.actors.launch import wait_for

    return wait_for(getattr(server, method).options(concurrency_group=group).remote(*args), method)


def eventually(true: Callable[[], bool], timeout_s: float = 60.0) -> None:
    begin = time.monotonic()
    while not true():
        assert time.monotonic() - begin < timeout_s, "it did not come about in time"
        time.sleep(0.05)


def test_the_same_spec_finds_the_running_server_and_another_is_refused_with_every_difference(
    serve: Served, entry: Callable[..., str]
) -> None:
    from raysvc.errors import ServerError

    uri = entry(50)
    one = serve("twice", sources=[uri])
    assert call(serve("twice", sources=[uri]), "stats")["pid"] == call(one, "stats")["pid"]
    with pytest.raises(ServerError, match=r"batch_size \(8 -> 16\)") as caught:
        serve("twice", sources=[uri], plan={"batch_size": 16}, lease_ttl_s=31)
    assert "lease_ttl_s (30.0 -> 31.0)" in str(caught.value)


def test_a_server_that_can_serve_nothing_says_why_and_leaves_no_actor(serve: Served, tmp_path: Path) -> None:
    from raysvc.actors.launch import server_names
    from raysvc.errors import ConfigError, EntryError

    with pytest.raises(EntryError, match="there is no such entry"):
        serve("nothing", sources=[str(tmp_path / "cache" / ("0" * 64))])
    with pytest.raises(ConfigError, match="logprobs"):
        serve("columns", plan={"columns": ("input_ids", "labels", "logprobs")})
    eventually(lambda: not {"nothing", "columns"} & set(server_names()))


def test_a_second_trainer_is_refused_until_it_takes_over_and_then_the_first_one_is_fenced(
    plain: Any,
) -> None:
    import raysvc
    from raysvc.errors import FencedError, LeaseHeld

    first = raysvc.attach("plain", dp_size=2)
    with pytest.raises(LeaseHeld, match="has been held by") as caught:
        raysvc.attach("plain")
    assert (caught.value.holder.split(":")[1], caught.value.since_s >= 0) == (
        str(__import__("os").getpid()),
        True,
    )
    with raysvc.attach("plain", dp_size=2, takeover=True) as second:
        for method in (lambda: next(iter(first)), lambda: first.rewind(0), lambda: first.fetch(0)):
            with pytest.raises(FencedError, match=f"the newest is {second.lease.fence}"):
                method()
        assert next(iter(second)).index == 0
    with pytest.raises(FencedError):
        first.detach()


def test_of_two_that_attach_at_once_exactly_one_wins(plain: Any) -> None:
    from raysvc.errors import LeaseHeld

    server = plain

    def attach(number: int) -> str:
        try:
            call(server, "attach", f"trainer {number}", group="lease")
        except LeaseHeld:
            return "refused"
        return "won"

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        outcome = list(pool.map(attach, range(8)))
    assert sorted(outcome) == ["refused"] * 7 + ["won"]


def test_a_step_longer_than_the_lease_does_not_lose_it(serve: Served) -> None:
    import raysvc
    from raysvc.errors import LeaseHeld

    server, seen_s = serve("long", lease_ttl_s=1.5), [0.0]
    with raysvc.attach("long") as client:
        step = next(iter(client))

        def has_beaten_for_longer_than_a_lease() -> bool:
            """Told right after a sign of life; nothing but heartbeats says anything to the server."""
            facts = call(server, "stats")
            seen_s.append(facts["seen_s"])
            return bool(facts["since_s"] > 2.0 and seen_s[-1] < seen_s[-2])

        eventually(has_beaten_for_longer_than_a_lease)
        with pytest.raises(LeaseHeld):
            raysvc.attach("long")
        client.commit(step.index)
    assert call(server, "stats")["frontier"] == 1


def test_control_calls_are_answered_while_a_large_step_is_collated(
    serve: Served, entry: Callable[..., str]
) -> None:
    import ray

    import raysvc

    uri = entry(4000, tokens=500)
    plan = {"batch_size": 2000, "mini_batch_size": 500, "epochs": 8, "pad_to_multiple": 4096}
    server = serve("busy", sources=[uri], plan=plan)
    with raysvc.attach("busy", look_ahead_steps=0) as client:
        answered = 0
        for step in range(16):  # as many as it takes: on a busy machine few calls meet one
            (info, *_) = client._connection.fetch("fetch", 5, step, (1,))  # 4 x 500 x 4096 cells of 13 bytes
            while answered < 5 and not ray.wait([info], timeout=0)[0]:
                before = call(server, "stats")["collating"]
                call(server, "heartbeat", client.lease.fence)
                answered += bool(before and call(server, "stats")["collating"])
            ray.wait([info])
            if answered >= 5:
                break
        assert answered >= 5


def test_an_idle_server_without_a_lease_frees_its_data_and_goes_on_when_asked(serve: Served) -> None:
    import raysvc

    server = serve("idle", orphan_ttl_s=0.4)
    with raysvc.attach("idle") as client:
        before = client.fetch(1)
    eventually(lambda: not call(server, "holds_data"))
    with raysvc.attach("idle") as client:
        assert client.fetch(1).mini_batches[0].info.row_ids.tolist() == (
            before.mini_batches[0].info.row_ids.tolist()
        )
        assert call(server, "holds_data")


def test_a_server_to_be_reaped_ends_when_nobody_holds_it(serve: Served) -> None:
    from raysvc.actors.launch import server_names

    serve("reaped", orphan_ttl_s=5.0, reap=True)
    eventually(lambda: "reaped" not in server_names(), 60.0)


def test_who_serves_a_name_waits_until_a_server_that_was_let_go_of_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from raysvc.actors import launch

    class Handle: ...

    held, key = Handle(), (launch.ray_namespace(), "one")
    named: list[str | None] = ["mine", "mine", "another's"]
    monkeypatch.setattr(launch, "_named", lambda name: named.pop(0))
    monkeypatch.setattr(launch, "_ending", {key: (weakref.ref(held), "mine")})
    assert launch._held_or_gone("one") is held
    assert launch._held_or_gone("other") is None
    assert len(named) == 3, "somebody holds it, and nobody here ever held the other one"
    del held
    assert launch._held_or_gone("one") is None
    assert (named, launch._ending) == ([], {})


def test_a_server_that_ends_with_its_handle_is_not_given_to_who_serves_its_name_next(
    entry: Callable[..., str], tmp_path: Path, ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raysvc.actors import launch
    from raysvc.actors.launch import start_server
    from raysvc.actors.server.spec import ServeSpec
    from raysvc.job.config import PlanConfig

    spec = ServeSpec(
        name="held", sources=[entry(50)], plan=PlanConfig(batch_size=8), pad_token_id=0,
        journal=str(tmp_path / "journal"), num_cpus=0,
    )  # fmt: skip
    incarnations, served = set(), []
    wait = launch._held_or_gone

    def noted(name: str) -> Any:
        held = wait(name)
        served.append(name in launch.server_names())
        return held

    monkeypatch.setattr(launch, "_held_or_gone", noted)
    for _ in range(3):
        server = start_server(spec, detached=False)
        again = start_server(spec, detached=False)
        (_, one), (_, other) = call(server, "spec_json"), call(again, "spec_json")
        assert one == other, "as long as there is a handle it is the same server"
        assert again is server, "by name Ray would give a handle that keeps no server alive"
        incarnations.add(one)
        del server, again
        gc.collect()  # a call that waited long leaves frames in circles, and the handle with them
    assert (len(incarnations), served) == (3, [False, True] * 3)


def test_the_command_line_serves_lists_and_stops(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    import json

    import ray
    import yaml
    from typer.testing import CliRunner

    import raysvc
    from raysvc.cli.main import app

    runner = CliRunner()

    def run(*arguments: str, code: int = 0) -> Any:
        result = runner.invoke(app, [*arguments, "--json"])
        assert result.exit_code == code, (result.exit_code, result.stderr, result.exception)
        return json.loads(result.stdout.splitlines()[-1]) if code == 0 else result.stderr

    job = tmp_path / "job.yaml"
    job.write_text(
        yaml.safe_dump(
            {
                "source": {"path": sample["rows"]},
                "tokenizer": sample["tokenizer"],
                "cache": {"root": str(tmp_path / "cache")},
                "server": {"name": "cli", "num_cpus": 0},
                "trainer": {"run_dir": str(tmp_path / "run")},
                "evals": {"valid": {"source": {"path": sample["rows"]}, "batch_size": 7}},
            }
        )
    )
    served = run("serve", "-c", str(job))
    assert (served["name"], served["num_rows"], served["num_steps"]) == ("cli", 240, 8)
    assert served["cluster"] == ray.get_runtime_context().gcs_address
    with raysvc.attach("cli") as client:
        assert len(client.eval("valid")) == 35
        (row,) = [row for row in run("ps")["servers"] if row["name"] == "cli"]
        assert (row["num_steps"], row["frontier"]) == (8, 0)
        assert row["holder"] is not None
        assert "has been held by" in run("stop", "cli", code=2)
        client.commit(next(client.steps()).index)
    again = run("serve", "-c", str(job))
    assert (served["frontier"], served["committed_by"]) == (0, None)
    assert again["frontier"] == 1
    assert again["committed_by"].startswith(f"{socket.gethostname()}:{os.getpid()}:")
    assert run("stop", "cli") == {"stopped": ["cli"]}
    assert "is not served" in run("stop", "cli", code=2)
    assert [row for row in run("ps")["servers"] if row["name"] == "cli"] == []


def test_a_holder_that_died_is_told_from_one_that_lives(serve: Served) -> None:
    from raysvc.cli.ps import _cells
    from raysvc.inspect.servers import list_servers

    server = serve("lapsed", lease_ttl_s=0.5)
    call(server, "attach", "a trainer that is killed", group="lease")

    def facts() -> dict[str, Any]:
        (mine,) = [facts for facts in list_servers() if facts["name"] == "lapsed"]
        return mine

    eventually(lambda: facts()["state"] == "lapsed")
    assert "silent for" in _cells(facts())["held"]
    assert facts()["holder"] == "a trainer that is killed"


def test_a_second_server_leaves_no_second_class_in_ray(serve: Served) -> None:
    """Ray keeps each class that was made an actor's for good, 100 kB in its GCS and more in this process."""
    import ray

    from raysvc.actors.launch import stop_server

    def classes() -> set[bytes]:
        gcs = ray._private.worker.global_worker.gcs_client
        return set(gcs.internal_kv_keys(b"ActorClass", b"fun"))

    serve("first")
    stop_server("first")
    before = classes()
    assert before
    serve("second")
    assert classes() == before
