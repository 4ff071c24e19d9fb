"""What comes out of a server: the same bytes whatever the look-ahead, each error at its step, nothing left behind."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysvc.collate.shard import read_shard

pytestmark = pytest.mark.ray
Served = Callable[..., Any]
PLANS = {
    "padded": {"tail": "pad"},  # 50 rows by 8: an uneven last step in each of three epochs
    "packed": {"tail": "wrap", "layout": "packed", "micro_batch_tokens": 64, "mini_batch_size": 8},
}


@pytest.fixture(params=sorted(PLANS))
def server(request: pytest.FixtureRequest, shared: Served, entry: Callable[..., str]) -> str:
    from raysvc.actors.server.spec import EvalSpec

    name = f"stream-{request.param}"
    evals = {"valid": EvalSpec(sources=(entry(13, seed=5),), batch_size=4)}
    shared(name, plan=PLANS[request.param], evals=evals)
    return name


def test_the_stream_is_the_same_for_every_look_ahead_over_epochs_resumes_and_evals(
    server: str, streams: Any
) -> None:
    import raysvc

    with raysvc.attach(server, dp_size=2, look_ahead_steps=0) as client:
        serial = streams.take(client)
    assert sorted(serial) == list(range(21))
    assert len({str(hashes) for hashes in serial.values()}) == 21, "no two steps are alike"
    for depth, nbytes in ((1, None), (4, None), (4, 4000)):
        with raysvc.attach(server, dp_size=2, look_ahead_steps=depth, look_ahead_bytes=nbytes) as client:
            client.rewind(0)
            first = streams.take(client, stop=10)  # stops in the second epoch
            state = client.state_dict()
        with raysvc.attach(server, dp_size=2, look_ahead_steps=depth) as client:
            client.load_state_dict(state)
            rest = {}
            for step in client:
                rest[step.index] = streams.opened(step)
                if step.index % 6 == 0:  # an eval in between, left in the middle once
                    for number, _ in enumerate(client.eval("valid")):
                        if (step.index, number) == (12, 1):
                            break
                client.commit(step.index)
        assert {**first, **rest} == serial


def test_row_ids_lengths_and_sizes_are_known_without_reading_a_row(server: str) -> None:
    import ray

    import raysvc

    with raysvc.attach(server, dp_size=2) as client:
        for index in (0, 6):
            outline, step = client.outline(index), client.fetch(index)
            for seen, mini in zip(outline.mini_batches, step.mini_batches, strict=True):
                shards = [read_shard(value) for value in ray.get(list(mini.shards))]
                assert seen.row_ids.tolist() == mini.info.row_ids.tolist()
                assert seen.lengths.tolist() == mini.info.lengths.tolist()
                assert seen.rank_bytes == tuple(shard.nbytes for shard in shards)
                assert seen.rank_tokens == mini.info.rank_tokens
                assert seen.num_micro_batches == len(shards[0].micro_batches)


def test_an_eval_gives_every_row_once_padded_to_the_ranks(server: str) -> None:
    import ray

    import raysvc

    with raysvc.attach(server, dp_size=3) as client:
        valid = client.eval("valid")
        for _ in range(2):  # it may be read again
            rows, counted = [], 0
            for step in valid:
                (mini,) = step.mini_batches
                shards = [read_shard(value) for value in ray.get(list(mini.shards))]
                ids = np.concatenate([shard.row_ids for shard in shards])
                rows += ids[ids >= 0].tolist()
                counted += mini.info.denominators.rows
                assert len({len(shard.micro_batches) for shard in shards}) == 1
            assert sorted(rows) == list(range(13))
            assert counted == 13
        with pytest.raises(raysvc.errors.ServerError, match=r"no eval 'test' \(there are: valid\)"):
            client.eval("test")


def test_a_loop_that_goes_on_where_another_one_was_is_told_unless_it_says_where_it_begins(
    plain: Any, caplog: pytest.LogCaptureFixture
) -> None:
    import raysvc

    def told(begin: Callable[[Any], object], rank: int | None = None) -> list[str]:
        caplog.clear()
        attached = raysvc.attach("plain") if rank is None else raysvc.attach_rank("plain", rank=rank)
        with attached as client:
            begin(client)
            for stop in (client.next_step + 1, client.next_step + 2):  # it is said once
                for step in client.steps(stop=stop):
                    client.commit(step.index)
            state.update(client.state_dict())
        return [record.getMessage() for record in caplog.records if "goes on" in record.getMessage()]

    state: dict[str, Any] = {}
    assert told(lambda client: client.rewind(0)) == []
    (said,) = told(lambda client: None)
    process = f"{socket.gethostname()}:{os.getpid()}:"
    assert said.startswith(f"goes on name=plain at_step=2: {process}")
    assert " committed what is before; load its checkpoint" in said
    assert told(lambda client: client.load_state_dict(dict(state))) == []
    (said,) = told(lambda client: None, rank=0)
    assert "at_step=6" in said


def test_a_wrong_step_number_is_a_typed_error(plain: Any) -> None:
    import raysvc
    from raysvc.errors import StepOutOfOrder

    with raysvc.attach("plain") as client:
        for wrong in (-1, 21, 10**9):
            for ask in (client.fetch, client.outline):
                with pytest.raises(StepOutOfOrder, match="a step from 0 to 20"):
                    ask(wrong)
        with pytest.raises(StepOutOfOrder, match="a step from 0 to 21"):
            client.rewind(22)
        with pytest.raises(StepOutOfOrder, match="expected step 0"):
            client.commit(1)
        older = iter(client)
        assert next(older).index == 0
        client.rewind(5)
        with pytest.raises(StepOutOfOrder, match="a new iteration from step 5"):
            next(older)
        assert next(iter(client)).index == 5


def test_an_error_in_collation_comes_at_its_step_and_not_before(
    serve: Served, entry: Callable[..., str], streams: Any
) -> None:
    import raysvc
    from raysvc.errors import StepFailed

    uri = entry(40, per_part=8)
    serve("broken", sources=[uri], plan={"shuffle": "none"})
    parts = sorted(path for path in Path(uri).iterdir() if path.suffix == ".arrow")
    parts[2].unlink()  # rows 16 to 23: step 2
    with raysvc.attach("broken", look_ahead_steps=4) as client:
        steps = iter(client)
        for index in (0, 1):
            assert next(steps).index == index
            client.commit(index)
        with pytest.raises(StepFailed, match="step 2") as caught:
            next(steps)
        assert caught.value.step == 2
        assert client.state_dict()["frontier"] == 2
        client.commit(2, skipped=True)
        assert [step.index for step in client.steps(stop=5)] == [3, 4]


class Boom(Exception):
    """What a training loop raises."""


@pytest.mark.parametrize("collation_fails_too", [False, True])
def test_the_loops_own_error_is_the_one_to_see_and_nothing_is_left(
    serve: Served, entry: Callable[..., str], streams: Any, collation_fails_too: bool
) -> None:
    import raysvc
    from raysvc.actors.launch import wait_for

    uri = entry(40, per_part=8)
    name = f"boom-{collation_fails_too}"
    server = serve(name, sources=[uri], plan={"shuffle": "none"})
    if collation_fails_too:
        for part in sorted(Path(uri).glob("*.arrow"))[1:]:  # every step but the first
            part.unlink()
    threads, refs = streams.threads(), streams.num_refs()

    def loop() -> None:
        with raysvc.attach(name, dp_size=2, look_ahead_steps=4) as client:
            for step in client:
                assert len(step.mini_batches) == 2
                raise Boom("the loss is not a number")

    with pytest.raises(Boom) as caught:
        loop()
    caught.value.__traceback__ = None  # its frames hold the step
    del caught
    assert streams.threads() <= threads
    assert streams.falls_to(refs, streams.num_refs)
    stats = wait_for(server.stats.options(concurrency_group="control").remote(), "stats")
    assert stats["holder"] is None


def test_commits_are_monotone_repeatable_marked_and_survive_a_new_server(serve: Served, entry: Any) -> None:
    import raysvc
    from raysvc.actors.launch import stop_server, wait_for

    uri = entry(50)
    serve("commits", sources=[uri])
    with raysvc.attach("commits") as client:
        for index in (0, 0, 1, 0, 2):
            client.commit(index, skipped=index == 1)
        assert client.next_step == 3
    stop_server("commits")
    server = serve("commits", sources=[uri])
    with raysvc.attach("commits") as client:
        assert next(iter(client)).index == 3
        stats = wait_for(server.stats.options(concurrency_group="control").remote(), "stats")
        assert (stats["frontier"], stats["skipped"], stats["fence"]) == (3, 1, 2)
        client.rewind(1)
        assert next(iter(client)).index == 1


def test_a_state_is_the_frontier_with_fetches_in_flight_and_the_trainers_state_wins(
    serve: Served, entry: Any
) -> None:
    import json

    import raysvc
    from raysvc.errors import StateMismatch

    uri = entry(50)
    serve("state", sources=[uri])
    serve("foreign", sources=[entry(50, seed=1)], plan={"batch_size": 10, "mini_batch_size": 5})
    with raysvc.attach("state", look_ahead_steps=4) as client:
        for step in client.steps(stop=6):
            client.commit(step.index)
            assert client.state_dict()["frontier"] == step.index + 1
        state = json.loads(json.dumps(client.state_dict()))
    assert (state["frontier"], state["plan"]["groups"]) == (6, 48)
    for at in (0, 15):  # the server is behind, and ahead
        with raysvc.attach("state", dp_size=3) as client:
            client.rewind(at)
            client.load_state_dict(state)
            assert next(iter(client)).index == 6
    with raysvc.attach("foreign") as client:
        with pytest.raises(StateMismatch) as caught:
            client.load_state_dict(state)
        for name in ("batch_size was 8 and is 10", "mini_batch_size was 4 and is 5", "entry_keys was"):
            assert name in str(caught.value)
        assert client.next_step == 0


def test_roles_of_different_size_get_the_same_rows_and_outputs_come_back_in_row_order(
    serve: Served,
) -> None:
    import ray

    import raysvc

    serve("roles", plan={"update_epochs": 2})
    with raysvc.attach("roles", roles={"policy": 3, "critic": 2}) as client:
        step = client.fetch(6)
        assert len(list(step.optimizer_steps())) == 2 * len(step.mini_batches)
        for mini in step.mini_batches:
            assert mini.shards == mini.by_role["policy"]
            for role, dp_size in (("policy", 3), ("critic", 2)):
                shards = [read_shard(value) for value in ray.get(list(mini.by_role[role]))]
                assert len(shards) == dp_size
                restored = mini.restore([shard.row_ids * 10 for shard in shards], role)
                assert restored.tolist() == (mini.info.row_ids * 10).tolist()


def test_a_role_gets_the_columns_it_asks_for_and_no_byte_more(serve: Served) -> None:
    import ray

    import raysvc
    from raysvc.errors import ConfigError

    for layout in ({}, {"layout": "packed", "micro_batch_tokens": 64, "mini_batch_size": 8}):
        name = f"columns-{len(layout)}"
        serve(name, plan=layout)
        critic = raysvc.Role(3, columns=("input_ids",))
        with raysvc.attach(name, roles={"policy": 2, "critic": critic}, look_ahead_bytes=10**6) as client:
            steps = client.steps()
            step = next(steps)
            nbytes = 0
            for mini in step.mini_batches:
                policy, slim = (
                    [read_shard(value) for value in ray.get(list(mini.by_role[role]))]
                    for role in ("policy", "critic")
                )
                assert {"labels", "position_ids", "attention_mask"} <= set(policy[0].arrays)
                ours = {"input_ids", "segment_ids"} if layout else {"input_ids"}
                assert ours <= set(slim[0].arrays)
                assert not set(slim[0].arrays) & {"labels", "position_ids", "attention_mask"}
                assert slim[0].denominators == policy[0].denominators
                firsts = [shard.row_ids for shard in slim]
                assert mini.restore(firsts, "critic").tolist() == mini.info.row_ids.tolist()
                nbytes += sum(shard.nbytes for shard in (*policy, *slim))
            plans = client._connection.sizes(step.index, step.index + 1, tuple(client.roles.values()))
            assert plans() == [nbytes], "the plan knows the bytes of each role"
    with pytest.raises(ConfigError, match="a role asks for logprobs, and plan"):
        raysvc.attach(name, roles={"policy": raysvc.Role(1, columns=("input_ids", "logprobs"))})
    raysvc.attach(name).detach()  # the refused one took no lease
