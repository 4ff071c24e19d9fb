"""Dispatch over fake workers: who gets what, in which order, what overlaps, and what is moved."""

from __future__ import annotations

import time
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raysvc.actors.dispatch.dispatch import Pending, WorkerDispatch, WorkerGroup
from raysvc.actors.mesh import Mesh
from raysvc.actors.worker.losses import SftLoss
from raysvc.actors.worker.results import reduce_metrics
from raysvc.client.batch_client import MiniBatch, Step
from raysvc.collate.row_values import RowValues, cells_of, gather_rows, in_order, with_columns
from raysvc.errors import ConfigError, WorkerFailed

from .fake_workers import FakeWorker, MeetingWorker
from .shards import minis_of, random_rows

pytestmark = pytest.mark.ray


def group_of(mesh: Mesh) -> WorkerGroup:
    import ray

    actor = ray.remote(concurrency_groups={"stage": 1})(FakeWorker).options(num_cpus=0)
    return WorkerGroup([actor.remote(number) for number in range(mesh.size)], mesh)


def logs_of(group: WorkerGroup) -> list[list[tuple[str, Any, float]]]:
    return group.gather("read", group.call("read"))


def data_of(dp_size: int, layout: str = "padded_left") -> tuple[MiniBatch, RowValues]:
    """A mini-batch as refs, and its ids as row values."""
    import ray

    rows = random_rows(7, seed=1)
    ((_, shards, info),) = minis_of(
        rows, {"batch_size": 7, "layout": layout, "micro_batch_tokens": 30, "oversize": "alone"}, dp_size
    )
    ids = RowValues(rows.row_ids, rows.lengths.astype(np.int64), {"ids": rows.tokens["input_ids"]})
    return MiniBatch(tuple(ray.put(shard) for shard in shards), info), ids


@pytest.fixture(scope="module")
def three(ray_session: None) -> Any:
    """A policy of two dp ranks with two replicas each, a colocated reference, and a critic elsewhere."""
    groups = {
        "policy": group_of(Mesh(dp=2, tp=2)),
        "ref": group_of(Mesh(dp=1)),
        "critic": group_of(Mesh(dp=3)),
    }
    dispatch = WorkerDispatch(groups, colocated=[{"policy", "ref"}])
    for name in groups:
        dispatch.init_model(name)
    yield dispatch
    dispatch.shutdown()


@pytest.mark.parametrize("name", ["policy", "critic"])
@pytest.mark.parametrize("layout", ["padded_left", "padded_right", "packed"])
def test_outputs_come_in_row_order_without_dummies(three: WorkerDispatch, name: str, layout: str) -> None:
    data, ids = data_of(three.groups[name].mesh.dp, layout)
    out = three.forward(name, data)
    assert data.info is not None
    assert out.row_ids.tolist() == data.info.row_ids.tolist()
    expected = in_order([ids], data.info.row_ids)
    assert out.tokens["logprobs"].tolist() == (2.0 * expected.tokens["ids"]).tolist()


def test_replicas_share_a_shard_and_one_of_them_answers(three: WorkerDispatch) -> None:
    data, ids = data_of(2)
    before = [len(log) for log in logs_of(three.groups["policy"])]
    metrics = three.forward_backward("policy", data, SftLoss(), columns=ids.renamed(advantages="ids"))
    for log, start in zip(logs_of(three.groups["policy"]), before, strict=True):
        (names,) = [what for name, what, _ in log[start:] if name == "forward_backward"]
        assert "advantages" in names
    assert metrics == {"loss": 1.0, "ratio_max": 2.0, "lr": 0.1}  # of workers 0 and 2


class Handle:
    """Stands for an actor's handle: every method notes its arguments and answers with the worker's number."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.got: dict[str, list[Any]] = {}

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Any:
            import ray

            self.got.setdefault(name, []).append(arguments)
            return ray.put(self.number)

        return SimpleNamespace(remote=remote, options=lambda **_: SimpleNamespace(remote=remote))


@pytest.mark.parametrize("mesh", [Mesh(2, tp=2), Mesh(3, cp=2), Mesh(2, tp=2, pp=3, cp=2)])
def test_all_replicas_of_a_dp_rank_are_handed_the_same_ref(ray_session: None, mesh: Mesh) -> None:
    handles = [Handle(number) for number in range(mesh.size)]
    group, (data, _) = WorkerGroup(handles, mesh), data_of(mesh.dp)
    group.stage_mini((0, 0), data.shards)
    for number, handle in enumerate(handles):
        (((_, shard),),) = handle.got.values()
        assert shard is data.shards[mesh.rank(number).dp]
    answers = group.collect("forward", group.call("forward", (0, 0)))
    assert [mesh.rank(number) for number in answers] == [(dp, mesh.pp - 1, 0, 0) for dp in range(mesh.dp)]
    assert all(len(handle.got["forward"]) == 1 for handle in handles)


def test_a_group_trains_the_mini_batches_of_a_step_once_in_every_update_epoch(ray_session: None) -> None:
    handles = [Handle(number) for number in range(2)]
    group, minis = WorkerGroup(handles), (data_of(2)[0], data_of(2)[0])
    step = Step(3, 0, minis, update_epochs=2)
    group.stage(step)
    group.start_step(step)
    keys = [(3, index) for index in range(4)]
    for rank, handle in enumerate(handles):
        assert [key for key, _ in handle.got["stage"]] == keys
        shards = [shard for _, shard in handle.got["stage"]]
        assert shards == [mini.shards[rank] for mini in (*minis, *minis)]
        assert handle.got["train_step"] == [(keys, None)]


def test_a_group_takes_the_shards_of_its_role_and_refuses_any_other_number_of_them(
    three: WorkerDispatch,
) -> None:
    (for_policy, _), (for_critic, _) = data_of(2), data_of(3)
    assert for_policy.info is not None
    both = MiniBatch(
        for_policy.shards, for_policy.info, {"policy": for_policy.shards, "critic": for_critic.shards}
    )
    for name in ("policy", "critic"):
        assert three.forward(name, both).row_ids.tolist() == for_policy.info.row_ids.tolist()
    with pytest.raises(ConfigError, match="2 shards, group 'critic' has 3 dp ranks"):
        three.forward("critic", for_policy)


def test_a_colocated_pair_moves_only_when_it_must_and_never_overlaps(three: WorkerDispatch) -> None:
    policy, ref = three.groups["policy"], three.groups["ref"]
    three.optim_step("policy")  # from here on: the policy is on the device
    starts = [len(log) for log in logs_of(policy)], [len(log) for log in logs_of(ref)]
    data, small = data_of(2)[0], data_of(1)[0]
    pending: list[Any] = [
        three.forward_async("policy", data),
        three.forward_async("ref", small),
        three.forward_async("ref", small),
        three.forward_backward_async("policy", data),
        three.forward_backward_async("policy", data),
        three.optim_step_async("policy"),
    ]
    for one in pending:
        one.result()
    logs = [log[start:] for log, start in zip(logs_of(policy), starts[0], strict=True)]
    for log in logs:
        assert [what for name, what, _ in log if name == "place"] == [
            ("optimizer", False),
            ("model", False),
            ("model", True),
            ("optimizer", True),
        ]
    (there,) = [log[start:] for log, start in zip(logs_of(ref), starts[1], strict=True)]
    assert [name for name, _, _ in there] == ["place", "forward", "forward", "place"]
    gone = max(when for log in logs for name, what, when in log if what == ("model", False))
    back = min(when for log in logs for name, what, when in log if what == ("model", True))
    assert gone < there[0][2]
    assert there[-1][2] < back


def behind(gate: Path, data: MiniBatch) -> MiniBatch:
    """The mini-batch, its shards not there before `gate` is."""
    import ray

    @ray.remote(num_cpus=0, num_returns=len(data.shards))
    def when_open(*shards: Any) -> Any:
        while not gate.exists():
            time.sleep(0.005)
        return shards

    return MiniBatch(tuple(when_open.remote(*data.shards)), data.info)


def ask_everything(dispatch: WorkerDispatch, name: str, data: MiniBatch) -> dict[str, Pending[Any]]:
    """Every call of a group that waits for workers, in this order; none is waited for."""
    return {
        "forward": dispatch.forward_async(name, data),
        "forward_backward": dispatch.forward_backward_async(name, data),
        "optim_step": dispatch.optim_step_async(name),
        "evaluate": dispatch.evaluate_async(name, data),
        "evaluate_loss": dispatch.evaluate_loss_async(name, data),
        "set_lr": dispatch.set_lr_async(name, 0.25),
        "save_checkpoint": dispatch.save_checkpoint_async(name, "/there"),
        "load_checkpoint": dispatch.load_checkpoint_async(name, "/there"),
        "save_hf_model": dispatch.save_hf_model_async(name, "/there"),
        "export_weights": dispatch.sync_weights_async(name, name),
        "node_id": dispatch.node_ids_async(name),
        "setup": dispatch.init_model_async(name),
    }


def test_every_call_has_a_twin_that_returns_at_once_and_runs_in_its_turn(
    three: WorkerDispatch, tmp_path: Path
) -> None:
    critic, gate = three.groups["critic"], tmp_path / "gate"
    starts = [len(log) for log in logs_of(critic)]
    pending = ask_everything(three, "critic", behind(gate, data_of(3)[0]))
    # the critic has not begun, and a group of other devices is not kept up by it
    three.forward("policy", data_of(2)[0])
    three.optim_step("policy")
    assert not gate.exists()
    gate.touch()
    answers = {name: one.result() for name, one in pending.items()}
    for log, start in zip(logs_of(critic), starts, strict=True):
        names = [name for name, _, _ in log[start:] if name != "import_weights"]
        assert names == [name for name in pending if name != "node_id"]
    assert len(answers["forward"].row_ids) == len(answers["evaluate"].row_ids) == 7
    assert answers["node_id"] == ["node-0", "node-1"]
    assert pending["forward"].result() is answers["forward"]


def test_everything_asked_of_colocated_groups_queues_and_finds_its_memory(
    three: WorkerDispatch, tmp_path: Path
) -> None:
    policy, ref, gate = three.groups["policy"], three.groups["ref"], tmp_path / "gate"
    starts = [len(log) for log in logs_of(policy)], [len(log) for log in logs_of(ref)]
    first = three.forward_async("policy", behind(gate, data_of(2)[0]))
    pending = [ask_everything(three, "ref", data_of(1)[0]), ask_everything(three, "policy", data_of(2)[0])]
    third = three.sync_weights_async("policy", "ref")
    critic = three.forward("critic", data_of(3)[0])  # elsewhere: done while both still wait
    assert len(critic.row_ids) == 7
    gate.touch()
    for one in [first, *pending[0].values(), *pending[1].values(), third]:
        one.result()
    mine = [log[start:] for log, start in zip(logs_of(policy), starts[0], strict=True)]
    (theirs,) = [log[start:] for log, start in zip(logs_of(ref), starts[1], strict=True)]
    for log in mine:  # each has its turn, to the end, on every rank
        turns = sorted([(when, "policy") for *_, when in log] + [(when, "ref") for *_, when in theirs])
        assert [who for who, _ in groupby(who for _, who in turns)] == ["policy", "ref", "policy", "ref"]
    assert theirs[-1][:2] == ("import_weights", "weights of 0")


def test_weights_that_one_group_cannot_give_are_its_fault_and_nothing_is_assumed_of_either(
    three: WorkerDispatch,
) -> None:
    critic = three.groups["critic"]
    critic.gather("break_", critic.call("break_", 0))
    with pytest.raises(WorkerFailed, match=r"rank 0 failed in export_weights: KeyError: 'broken'"):
        three.sync_weights("critic", "policy")
    critic.gather("break_", critic.call("break_", -1))
    assert three.memory.moves("policy", "forward") != []
    three.memory.forget("policy")
    three.sync_weights("critic", "policy")
    assert {log[-1][:2] for log in logs_of(three.groups["policy"])} == {("import_weights", "weights of 0")}


def test_a_failed_call_names_the_rank_and_leaves_nothing_assumed(three: WorkerDispatch) -> None:
    three.optim_step("policy")
    with pytest.raises(WorkerFailed, match=r"rank \d failed in save_checkpoint: OSError: /disk is full"):
        three.save_checkpoint("policy", "/disk")
    assert three.memory.moves("policy", "forward") != []
    three.memory.forget("policy")
    assert len(three.forward("policy", data_of(2)[0]).row_ids) == 7


def test_groups_answer_for_themselves(three: WorkerDispatch) -> None:
    assert three.node_ids() == ["node-0", "node-1"]
    assert three.node_ids("ref") == ["node-0"]
    three.set_lr("ref", 0.5)
    assert logs_of(three.groups["ref"])[0][-1][:2] == ("set_lr", 0.5)


def test_metrics_of_ranks_become_one_number_by_their_names() -> None:
    ranks = [
        {"loss": 0.25, "ratio_max": 1.0, "len_min": 3.0, "lr": 0.1, "wait_s": 2.0},
        {"loss": 0.5, "ratio_max": 4.0, "len_min": 2.0, "lr": 0.1, "wait_s": 1.0},
        {"loss": 0.0},
    ]
    assert reduce_metrics(ranks) == {"loss": 0.75, "ratio_max": 4.0, "len_min": 2.0, "lr": 0.1, "wait_s": 2.0}


@pytest.mark.parametrize("mesh", [Mesh(1), Mesh(3, tp=2), Mesh(2, tp=2, pp=3, cp=2)])
def test_a_mesh_numbers_every_worker_once_and_collects_one_per_dp_rank(mesh: Mesh) -> None:
    ranks = [mesh.rank(index) for index in range(mesh.size)]
    assert len(set(ranks)) == mesh.size == mesh.dp * mesh.tp * mesh.pp * mesh.cp
    assert [ranks[index].dp for index in mesh.collected()] == list(range(mesh.dp))
    assert all(ranks[index][1:] == (mesh.pp - 1, 0, 0) for index in mesh.collected())


@pytest.mark.parametrize(
    "plan",
    [
        {"layout": "padded_right", "micro_batch_size": 2, "pad_to_multiple": 4},
        {"layout": "padded_left", "micro_batch_tokens": 40},
        {"layout": "packed", "micro_batch_tokens": 40, "align": 4},
    ],
)
@pytest.mark.parametrize("dp_size", [1, 3])
def test_what_goes_in_at_a_token_comes_out_at_that_token(plan: dict[str, Any], dp_size: int) -> None:
    rows = random_rows(11, seed=2)
    ((mini, shards, _),) = minis_of(rows, {"batch_size": 11, "oversize": "alone", **plan}, dp_size)
    columns = RowValues(rows.row_ids, rows.lengths.astype(np.int64), {"x": rows.tokens["advantages"]})
    parts = []
    for shard in shards:
        filled = with_columns(shard, columns)
        assert (filled.arrays["input_ids"].reshape(-1)[cells_of(shard)] > 0).all()
        parts.append(gather_rows(filled, {"x": filled.arrays["x"], "ids": filled.arrays["input_ids"]}))
    out = in_order(parts, mini.row_ids)
    expected = columns.pick(mini.row_ids)
    assert out.tokens["x"].tolist() == expected.tokens["x"].tolist()
    for row in range(11):
        where = slice(int(rows.offsets[mini.row_ids[row]]), int(rows.offsets[mini.row_ids[row] + 1]))
        assert out.row(row, "ids").tolist() == rows.tokens["input_ids"][where].tolist()


def test_columns_of_other_rows_are_refused() -> None:
    rows = random_rows(4)
    ((_, shards, _),) = minis_of(rows, {"batch_size": 4, "micro_batch_size": 2}, 1)
    short = RowValues(rows.row_ids[:3], rows.lengths[:3].astype(np.int64), {"x": np.zeros(100)})
    with pytest.raises(ConfigError, match="rows \\[3\\] are missing"):
        with_columns(shards[0], short)


@pytest.fixture
def meeting(ray_session: None, tmp_path: Path) -> Any:
    import ray

    actor = ray.remote(MeetingWorker).options(num_cpus=0)
    group = WorkerGroup([actor.remote(str(tmp_path), rank) for rank in range(3)])
    yield group
    (tmp_path / "all").touch()
    group.stop()


def test_a_call_after_one_in_which_a_rank_raised_and_others_wait_for_it_fails_within_seconds(
    meeting: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raysvc.actors.dispatch.worker_group.SETTLE_S", 0.3)
    first, second = meeting.call("meet", 1), meeting.call("meet", -1)
    with pytest.raises(WorkerFailed, match="rank 1 failed in meet: ValueError: a bad row"):
        meeting.gather("meet", first)
    for ask in (lambda: meeting.gather("meet", second), lambda: meeting.call("pid")):
        begin = time.monotonic()
        with pytest.raises(WorkerFailed, match=r"rank 1 .*a bad row .*ranks \[0, 2\] still wait"):
            ask()
        assert time.monotonic() - begin < 60
    monkeypatch.undo()  # now they may take their time
    (tmp_path / "all").touch()
    assert len(meeting.gather("pid", meeting.call("pid"))) == 3, "when all are through, the group goes on"


def test_of_a_death_and_the_lost_connections_that_it_causes_the_death_is_told_with_process_and_node(
    meeting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "raysvc.actors.dispatch.worker_group.SETTLE_S", 60.0
    )  # a death is seen late on a busy machine
    pids = meeting.gather("pid", meeting.call("pid"))
    with pytest.raises(WorkerFailed, match=rf"rank 2 failed in drop: its process {pids[2]} on node \S+ died"):
        meeting.gather("drop", meeting.call("drop", 2))
    with pytest.raises(WorkerFailed, match=rf"rank 2 failed in pid: its process {pids[2]}"):
        meeting.call("pid")
