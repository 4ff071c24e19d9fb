"""Rank mode: every rank attaches by itself. And sweeps: several trainers read one stream."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from raysvc.errors import StepOutOfOrder

pytestmark = pytest.mark.ray
Served = Callable[..., Any]
# what a loop may call that takes a step which is there; `__exit__` is that of a lock that nobody else wants
PLAIN = {
    ("C", name)
    for name in (
        "append",
        "get_nowait",
        "isinstance",
        "len",
        "monotonic",
        "next",
        "perf_counter",
        "setprofile",
        "__exit__",
    )
}


def stats(server: Any) -> dict[str, Any]:
    from raysvc.actors.launch import wait_for

    facts: dict[str, Any] = wait_for(server.stats.options(concurrency_group="control").remote(), "stats")
    return facts


def attach_ranks(name: str, num_ranks: int = 2, **options: Any) -> list[Any]:
    import raysvc

    return [
        raysvc.attach_rank(name, dp_size=num_ranks, rank=rank, group="g", **options)
        for rank in range(num_ranks)
    ]


def test_a_rank_may_ask_for_some_columns(plain: Any) -> None:
    import raysvc

    whole = {}
    for columns in (None, ["labels"]):
        with raysvc.attach_rank("plain", rank=0, group="g", columns=columns) as rank:
            shard = next(rank.steps(stop=1)).shards[0]
        whole |= shard.arrays
    assert set(shard.arrays) < set(whole)
    assert "labels" in shard.arrays
    assert "input_ids" not in shard.arrays
    assert shard.arrays["labels"].tobytes() == whole["labels"].tobytes()


def test_ranks_get_the_bytes_of_the_controller_and_a_step_is_collated_once(plain: Any, streams: Any) -> None:
    import raysvc

    server, threads = plain, streams.threads()
    with raysvc.attach("plain", dp_size=3) as client:
        expected = streams.take(client)
        client.rewind(0)
    made = stats(server)["made"]
    ranks = attach_ranks("plain", 3, look_ahead_steps=2)
    got: dict[int, Any] = {}
    for steps in zip(*(rank.steps() for rank in ranks), strict=True):
        index = steps[0].index
        got[index] = [
            [streams.digest(shard) for shard in mini] for mini in zip(*(s.shards for s in steps), strict=True)
        ]
        for rank in ranks:
            assert stats(server)["frontier"] == index, "committed when all ranks did"
            rank.commit(index)
        eventually_frontier(server, index + 1)
    assert got == expected
    assert stats(server)["made"] - made == len(expected)
    assert stats(server)["shared_bytes"] == 0, "every rank took every step, nothing is kept"
    for rank in ranks:
        rank.detach()
    assert stats(server)["holder"] is None
    assert streams.threads() <= threads, "a detached rank leaves no thread"


def test_a_holder_of_several_ranks_is_shown_with_the_process_of_its_first_rank(plain: Any) -> None:
    import os

    server = plain
    ranks = attach_ranks("plain")
    holder = stats(server)["holder"]
    assert holder.startswith("g (")
    assert f":{os.getpid()}:" in holder
    for rank in ranks:
        rank.detach()


def eventually_frontier(server: Any, frontier: int) -> None:
    import time

    begin = time.monotonic()
    while stats(server)["frontier"] != frontier:
        assert time.monotonic() - begin < 100


def test_a_process_of_another_group_or_on_a_taken_seat_is_refused_or_fences_all_ranks(plain: Any) -> None:
    import raysvc
    from raysvc.errors import ConfigError, FencedError, LeaseHeld

    old = attach_ranks("plain")
    assert old[0].lease.fence == old[1].lease.fence
    with pytest.raises(LeaseHeld, match="rank 1"):
        raysvc.attach_rank("plain", dp_size=2, rank=1, group="g")
    with pytest.raises(LeaseHeld):
        raysvc.attach_rank("plain", dp_size=2, rank=0, group="other")
    with pytest.raises(LeaseHeld):
        raysvc.attach("plain", dp_size=2)
    with pytest.raises(ConfigError, match=r"2 must be in \[0, 2\)"):
        raysvc.attach_rank("plain", dp_size=2, rank=2)
    new = [raysvc.attach_rank("plain", dp_size=2, rank=rank, group="g", takeover=True) for rank in (1, 0)]
    assert {client.lease.fence for client in new} == {old[0].lease.fence + 1}
    for client in old:
        with pytest.raises(FencedError):
            next(client.steps())
        with pytest.raises(FencedError):
            client.detach()
    for client in new:
        client.detach()


def test_a_torch_dataset_knows_its_length_and_goes_on_in_the_middle_of_a_step(serve: Served) -> None:
    import torch
    from torch.utils.data import DataLoader

    serve("torch", plan={"micro_batch_size": 2, "batch_size": 16, "mini_batch_size": 8, "epochs": 1})

    def ids(item: dict[str, torch.Tensor]) -> list[int]:
        return item["row_ids"].tolist()

    def read(from_state: Any = None, stop: int | None = None) -> tuple[list[list[int]], list[Any], int]:
        clients = attach_ranks("torch", takeover=True)
        for client in clients:
            client.rewind(0)
        dataset = clients[0].as_torch_dataset()
        if from_state is not None:
            dataset.load_state_dict(from_state)
        loader = DataLoader(dataset, batch_size=None, num_workers=0)
        length, items, states = len(loader), [], []
        for item in loader:
            assert item["input_ids"].dtype == torch.int32
            assert int(item["num_rows"]) in (8, 2)
            items.append(ids(item))
            states.append(dataset.state_dict())
            if len(items) == stop:
                break
        if stop is None:
            assert clients[0].next_step == clients[0].schedule.num_steps
        for client in clients:
            client.detach()
        return items, states, length

    items, states, length = read()
    assert length == len(items) == 13  # 16, 16, 16 and 2 rows on 2 ranks, 2 at a time
    for at in (1, 3, 4, 5, 11):
        rest, _, whole = read(states[at - 1])
        assert (rest, whole) == (items[at:], length)


def test_a_state_in_the_middle_of_a_step_fits_the_same_split_alone_and_at_its_end_any(serve: Served) -> None:
    from raysvc.errors import StateMismatch

    plan = {"micro_batch_size": 2, "batch_size": 16, "mini_batch_size": 8, "epochs": 1}
    serve("resplit", plan=plan)
    clients = attach_ranks("resplit")
    states = []
    dataset = clients[0].as_torch_dataset()
    for _ in zip(range(5), dataset, strict=False):
        states.append(dataset.state_dict())
    for client in clients:
        client.detach()
    (alone,) = attach_ranks("resplit", 1, takeover=True)
    dataset = alone.as_torch_dataset()
    dataset.load_state_dict(states[3])  # all four of step 0
    assert alone.next_step == 1
    assert set(next(iter(dataset))["row_ids"].tolist()) <= set(
        alone.outline(1).mini_batches[0].row_ids.tolist()
    )
    dataset = alone.as_torch_dataset()
    dataset.load_state_dict(states[1])
    with pytest.raises(StateMismatch, match="in the middle of step 0"):
        next(iter(dataset))
    alone.detach()


def test_a_worker_process_of_a_loader_is_refused(plain: Any) -> None:
    from torch.utils.data import DataLoader

    import raysvc

    with raysvc.attach_rank("plain", rank=0, group="g") as client:
        from raysvc.client.torch_dataset import RankDataset

        dataset = client.as_torch_dataset()
        assert isinstance(dataset, RankDataset)
        loader = DataLoader(dataset, batch_size=None, num_workers=1)
        with pytest.raises(Exception, match=r"num_workers|pickle"):
            next(iter(loader))


def test_trainers_of_a_sweep_read_one_stream_each_at_its_own_pace(
    serve: Served, plain: Any, streams: Any
) -> None:
    import raysvc
    from raysvc.errors import ServerError

    server = serve("sweep", share="stream")
    readers = [raysvc.attach("sweep", reader=f"trial-{number}", look_ahead_steps=1) for number in range(3)]
    assert len({reader.lease.fence for reader in readers}) == 3
    heads = [streams.take(reader, stop=stop) for reader, stop in zip(readers, (3, 6, 9), strict=True)]
    made = stats(server)["made"]
    assert made <= 12, "steps within the window are collated once"
    wholes = [{**head, **streams.take(reader)} for head, reader in zip(heads, readers, strict=True)]
    assert wholes[0] == wholes[1] == wholes[2]
    readers[0].rewind(0)
    assert streams.take(readers[0], stop=1)[0] == wholes[0][0], "what fell out is made again"
    for reader in readers:
        reader.detach()
    assert stats(server)["shared_bytes"] == 0
    with pytest.raises(ServerError, match="is not shared"):
        raysvc.attach("plain", reader="trial-1")


class Boom(Exception):
    """What a training loop raises."""


@pytest.mark.parametrize("collation_fails_too", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_rank_whose_loop_fails_raises_its_own_error_and_leaves_nothing_but_its_commits(
    serve: Served, entry: Callable[..., str], streams: Any, collation_fails_too: bool
) -> None:
    from pathlib import Path

    import raysvc

    uri = entry(40, per_part=8)
    name = f"rank-boom-{collation_fails_too}"
    server = serve(name, sources=[uri], plan={"shuffle": "none"})
    if collation_fails_too:
        for part in sorted(Path(uri).glob("*.arrow"))[3:]:  # every step but the first three
            part.unlink()
    threads, refs = streams.threads(), streams.num_refs()

    def loop() -> None:
        with raysvc.attach_rank(name, rank=0, group="g", look_ahead_steps=4) as client:
            for step in client.steps():
                if step.index == 2:
                    raise Boom("the loss is not a number")
                client.commit(step.index)

    with pytest.raises(Boom) as caught:
        loop()
    caught.value.__traceback__ = None  # its frames hold the step
    del caught
    assert streams.threads() <= threads
    assert streams.falls_to(refs, streams.num_refs)
    facts = stats(server)
    assert (facts["holder"], facts["frontier"]) == (None, 2), "what was committed is"


def test_a_commit_of_a_rank_that_was_fenced_is_refused_by_one_of_its_next_calls(serve: Served) -> None:
    import raysvc
    from raysvc.errors import FencedError

    server = serve("late", lease_ttl_s=600)
    (old,) = attach_ranks("late", 1)
    steps = old.steps()
    next(steps)
    with raysvc.attach_rank("late", rank=0, group="other", takeover=True):
        until = time.monotonic() + 30  # it has no heartbeat for minutes: the refusal itself tells
        with pytest.raises(FencedError):
            any(
                old.commit(step)
                for step in itertools.takewhile(lambda _: time.monotonic() < until, itertools.count())
            )
    assert stats(server)["frontier"] == 0, "a zombie moved nothing"
    with pytest.raises(FencedError):
        old.detach()


def test_an_error_in_collation_comes_to_every_rank_at_its_step(
    serve: Served, entry: Callable[..., str]
) -> None:
    from pathlib import Path

    from raysvc.errors import StepFailed

    uri = entry(40, per_part=8)
    serve("rank-broken", sources=[uri], plan={"shuffle": "none"})
    sorted(Path(uri).glob("*.arrow"))[2].unlink()  # rows 16 to 23: step 2
    ranks = attach_ranks("rank-broken", look_ahead_steps=4)
    for rank in ranks:
        steps = rank.steps()
        for index in (0, 1):
            assert next(steps).index == index
            rank.commit(index)
        with pytest.raises(StepFailed, match="step 2"):
            next(steps)
        rank.commit(2, skipped=True)
        assert [step.index for step in rank.steps(stop=5)] == [3, 4]
    for rank in ranks:
        rank.detach()


def test_ranks_evaluate_every_row_once_in_the_middle_of_an_epoch_and_training_does_not_notice(
    serve: Served, entry: Callable[..., str], streams: Any
) -> None:
    from raysvc.actors.server.spec import EvalSpec
    from raysvc.errors import ServerError

    evals = {"valid": EvalSpec(sources=(entry(13, seed=5),), batch_size=4)}
    server, threads = serve("rank-eval", evals=evals, plan={"micro_batch_size": 2}), streams.threads()

    def train(rank: Any, evaluated: list[list[list[int]]] | None) -> list[str]:
        hashes = []
        for step in rank.steps(stop=9):
            hashes += [streams.digest(shard) for shard in step.shards]
            if evaluated is not None and step.index in (2, 7):
                evaluated.append([micro.tensors["row_ids"].tolist() for micro in rank.eval("valid")])
                next(iter(rank.eval("valid")))  # left in the middle
            rank.commit(step.index)
        return hashes

    for depth in (0, 2):
        ranks = attach_ranks("rank-eval", 2, look_ahead_steps=depth)
        plain = [train(rank, None) for rank in ranks]
        for rank in ranks:
            rank.rewind(0)
        passes: list[list[list[list[int]]]] = [[], []]  # [rank][pass][micro-batch][row]
        assert [train(rank, own) for rank, own in zip(ranks, passes, strict=True)] == plain
        for both in zip(*passes, strict=True):
            rows = sorted(row for own in both for micro in own for row in micro if row >= 0)
            assert rows == list(range(13))
            assert len(both[0]) == len(both[1]), "all ranks do the same number of passes"
        assert len(ranks[0].eval("valid")) == 4
        with pytest.raises(ServerError, match=r"no eval 'test'"):
            ranks[0].eval("test")
        for rank in ranks:
            rank.rewind(0)
        for rank in ranks:
            rank.detach()
    assert stats(server)["holder"] is None
    assert streams.threads() <= threads


def test_a_commit_reaches_the_server_while_its_loop_computes_or_holds_the_next_step(plain: Any) -> None:
    server = plain
    (rank,) = attach_ranks("plain", 1, look_ahead_steps=2)
    with rank:
        steps = rank.steps()
        next(steps)
        rank.commit(0)  # nothing of this client is called from here on
        until = time.monotonic() + 30
        while stats(server)["frontier"] == 0 and time.monotonic() < until:
            time.sleep(0.02)
        assert stats(server)["frontier"] == 1
        for step in itertools.islice(steps, 3):
            rank.commit(step.index)
        steps.close()
        assert rank.next_step == 4
    assert stats(server)["frontier"] == 4, "those of an iteration that was left are sent, too"


def test_a_step_that_is_ready_costs_its_loop_few_calls_no_message_and_no_wake(plain: Any) -> None:
    (rank,) = attach_ranks("plain", 1, look_ahead_steps=2)
    calls: list[tuple[str, str]] = []  # module and name, of this thread alone

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            calls.append((frame.f_globals["__name__"], frame.f_code.co_name))
        elif event == "c_call":
            calls.append(("C", argument.__name__))

    with rank:
        steps = rank.steps()
        index = next(steps).index
        for _ in range(5):
            brought(rank)
            calls.clear()
            sys.setprofile(seen)
            rank.commit(index)
            index = next(steps).index
            sys.setprofile(None)
            ours = [name for module, name in calls if module.startswith("raysvc")]
            assert ours == ["commit", "_read_ahead"]
            assert {call for call in calls if not call[0].startswith("raysvc")} <= PLAIN
        steps.close()


def brought(rank: Any) -> None:
    """Wait until the next step is there."""
    until = time.monotonic() + 30
    while rank._window.ready.empty():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_a_rank_goes_on_from_another_step_with_commits_and_fetches_under_way(plain: Any) -> None:
    server = plain
    (rank,) = attach_ranks("plain", 1, look_ahead_steps=3)
    with rank:
        for _ in range(6):
            old = rank.steps()
            for step in itertools.islice(old, 4):
                rank.commit(step.index)
            rank.rewind(1)
            with pytest.raises(StepOutOfOrder, match="after the rewind"):
                next(old)
            again = rank.steps()
            assert next(again).index == 1
            rank.rewind(0)
        assert stats(server)["frontier"] == 0
