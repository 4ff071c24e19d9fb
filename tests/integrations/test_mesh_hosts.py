"""What torchtitan, Megatron-core and torch's `context_parallel` make of a micro-batch, against the parts that a server cuts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import raysvc
from raysvc.actors.mesh import Mesh
from raysvc.collate.cp_cut import cp_cut
from raysvc.collate.shard import Shard
from raysvc.errors import ConfigError
from raysvc.integrations.megatron import megatron_batch, packed_rows
from raysvc.integrations.torchtitan import titan_batch
from raysvc.job.config import PlanConfig
from tests.client.test_seats import process_group
from tests.collate.conftest import collate_step, random_data

from .stream_client import client_of

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 calls it
CP = 2
Batch = dict[str, Any]
Tensors = dict[str, torch.Tensor]


def client(cuts: bool, cp: int = CP) -> Any:
    return SimpleNamespace(lease=SimpleNamespace(cuts=cuts), mesh=Mesh(1, cp=cp))


def shard_of(**plan: Any) -> Shard:
    layout = {
        "layout": "padded_right",
        "micro_batch_size": 3,
        "align": 2 * CP,
        "pad_to_multiple": 2 * CP,
        **plan,
    }
    lengths = [9, 30, 5, 17, 41, 2, 26]
    [(_, (shard,))] = collate_step(random_data(lengths), PlanConfig(batch_size=len(lengths), **layout), 1)
    return shard


def micros_of(shard: Shard) -> list[Tensors]:
    return [
        {name: torch.from_numpy(array) for name, array in shard.micro(number).items()}
        for number in range(len(shard.micro_batches))
    ]


def by_torch(batch: Batch, rank: int) -> Batch:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    whole = {name: each.clone() for name, each in batch.items() if each is not None}
    with context_parallel(
        init_device_mesh("cpu", (CP,)), buffers=list(whole.values()), buffer_seq_dims=[1] * len(whole)
    ):
        return {name: each.clone() for name, each in whole.items()}


def by_torchtitan(batch: Batch, rank: int) -> Batch:
    cut = pytest.importorskip("torchtitan.distributed.context_parallel", reason="torchtitan is not installed")
    from torch.distributed.device_mesh import init_device_mesh

    more = {"positions": batch["position_ids"]}
    mesh = init_device_mesh("cpu", (CP,))
    ids, labels, more = cut.prepare_context_parallel_input(
        batch["tokens"], batch["labels"], more, mesh, "cpu"
    )
    return {"tokens": ids, "labels": labels, "position_ids": more["positions"]}


def by_megatron(batch: Batch, rank: int) -> Batch:
    utils = pytest.importorskip("megatron.core.utils", reason="megatron-core is not installed")
    found: Batch = utils.get_batch_on_this_cp_rank(dict(batch), torch.distributed.group.WORLD)
    return found


@pytest.mark.parametrize("cut", [by_torch, by_torchtitan, by_megatron])
def test_a_host_that_cuts_whole_lines_gets_what_a_server_cuts_as_head_tail(
    cut: Callable[[Batch, int], Batch],
) -> None:
    shard = shard_of()
    whole, parts = micros_of(shard), [micros_of(part) for part in cp_cut(shard, CP, "head_tail")]
    for rank, number in itertools.product(range(CP), range(len(whole))):
        ours = megatron_batch(parts[rank][number], client(cuts=True))
        with process_group(rank, CP):
            theirs = cut(megatron_batch(whole[number], client(cuts=False)), rank)
        for name in set(theirs) - {"attention_mask"}:
            assert theirs[name].tolist() == ours[name].tolist(), name


def test_a_batch_of_megatron_has_each_label_where_it_is_predicted_and_counts_the_targets() -> None:
    shard = shard_of()
    for tensors in micros_of(shard):
        batch = megatron_batch(tensors, client(cuts=False))
        assert batch["loss_mask"].sum() == (tensors["labels"] != -100).sum()
        for line, place in torch.nonzero(batch["loss_mask"]).tolist():
            assert batch["labels"][line, place] == batch["tokens"][line, place + 1]
        assert (batch["labels"] >= 0).all(), "Megatron looks up every label"
        kinds = {name: batch[name].dtype for name in batch if batch[name] is not None}
        assert kinds.pop("loss_mask") == torch.float32
        assert set(kinds.values()) == {torch.int64}


def test_whole_lines_that_a_host_cannot_cut_are_refused_by_name() -> None:
    (tensors, *_) = micros_of(shard_of(pad_to_multiple=1))
    said = r"plan\.pad_to_multiple: makes lines of \d+ tokens, which do not divide into 6 parts, for cp=3"
    with pytest.raises(ConfigError, match=said):
        megatron_batch(tensors, client(cuts=False, cp=3))
    with pytest.raises(ConfigError, match=said):
        titan_batch(tensors, 3)
    titan_batch(tensors)


def thd_indices(ends: torch.Tensor, width: int, size: int, rank: int) -> torch.Tensor:
    """Transformer Engine's `thd_get_partitioned_indices`, by its documentation."""
    own = []
    for begin, end in itertools.pairwise(ends.tolist()):
        chunk = (end - begin) // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            own += range(begin + number * chunk, begin + (number + 1) * chunk)
    assert ends[-1] == width, "the rows cover the line"
    return torch.tensor(own)


def test_packed_lines_are_cut_as_megatron_cuts_thd(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = pytest.importorskip("megatron.core.utils", reason="megatron-core is not installed")
    monkeypatch.setattr(utils, "tex", SimpleNamespace(thd_get_partitioned_indices=thd_indices), raising=False)
    monkeypatch.setattr(utils, "is_te_min_version", lambda version: True)
    shard = shard_of(layout="packed", micro_batch_size=None, micro_batch_tokens=64, pad_to_multiple=64)
    whole, parts = micros_of(shard), [micros_of(part) for part in cp_cut(shard, CP, "zigzag")]
    assert any(int(each["cu_seqlens"][-1]) < each["input_ids"].shape[1] for each in whole), (
        "some end in padding"
    )
    for rank, number in itertools.product(range(CP), range(len(whole))):
        rows = packed_rows(whole[number], client(cuts=False))
        batch = megatron_batch(whole[number], client(cuts=False))
        longest = torch.tensor([rows.max_seqlen_q])
        theirs, told = utils.get_thd_batch_on_this_cp_rank(
            batch, rows.cu_seqlens_q, rows.cu_seqlens_q_padded, longest, CP, rank
        )
        ours = megatron_batch(parts[rank][number], client(cuts=True))
        for name in set(ours) - {"attention_mask"}:
            assert theirs[name].tolist() == ours[name].tolist(), name
        own = packed_rows(parts[rank][number], client(cuts=True))
        assert (own.qkv_format, own.max_seqlen_q) == (told.qkv_format, told.max_seqlen_q)
        assert own.cu_seqlens_q.tolist() == told.cu_seqlens_q.tolist()
        assert own.cu_seqlens_kv_padded.tolist() == told.cu_seqlens_kv_padded.tolist()


def test_lines_that_thd_does_not_take_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"plan\.layout: makes no micro-batch of one packed line"):
        packed_rows(micros_of(shard_of())[0], client(cuts=False))
    packed = shard_of(layout="packed", micro_batch_size=None, micro_batch_tokens=64)
    (part, _) = cp_cut(packed, CP, "head_tail")
    with pytest.raises(ConfigError, match=r"plan\.cp_split: cuts a packed line across its rows"):
        packed_rows(micros_of(part)[0], client(cuts=True))


def titan_of(served: Any, monkeypatch: pytest.MonkeyPatch, **changed: Any) -> Any:
    """torchtitan's loader of a client, built as its trainer builds it."""
    module = pytest.importorskip("raysvc.integrations.titan_loader", reason="torchtitan is not installed")
    from torchtitan.config.configs import ParallelismConfig

    served.lease.cuts, served.detach = changed.pop("cuts", False), lambda: None
    given: dict[str, Any] = {}
    monkeypatch.setattr(raysvc, "attach", lambda name, **others: given.update(others, name=name) or served)
    config = module.ServerLoader.Config(
        server="s", parallelism=ParallelismConfig(data_parallel_shard_degree=served.dp_size)
    )
    built = {
        "dp_world_size": served.dp_size,
        "dp_rank": served.rank,
        "seq_len": 4096,
        "local_batch_size": 4,
        **changed,
    }
    with process_group(served.rank, served.dp_size):
        loader = config.build(tokenizer=None, snapshot_every_n_steps=1, **built)
    assert (given["name"], given["mesh"].dp_shard) == ("s", served.dp_size)
    assert config.to_dict()["server"] == "s"
    return loader


def test_the_loader_that_torchtitan_builds_goes_on_from_a_checkpoint_of_all_ranks(
    tmp_path: Path, sample: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = {"batch_size": 32, "mini_batch_size": 16, "micro_batch_size": 4, "tail": "drop"}
    loaders = [titan_of(client_of(tmp_path, sample, rank, 2, **plan), monkeypatch) for rank in (0, 1)]
    state, left = {}, []
    for loader in loaders:
        items = iter(loader)
        taken = [next(items) for _ in range(3)]
        assert taken[0][0]["input"].shape == taken[0][1].shape
        state |= loader.state_dict()
        left.append([labels.tolist() for _, labels in items])
    for rank in (0, 1):
        loader = titan_of(client_of(tmp_path, sample, rank, 2, **plan), monkeypatch)
        loader.load_state_dict(state)
        assert [labels.tolist() for _, labels in loader] == left[rank]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"cuts": True}, r"plan\.cp_split: is set, and torchtitan cuts lines itself"),
        (
            {"dp_rank": 1},
            r"ServerLoader\.Config\(parallelism\): means rank 0 of 2, and the trainer's is 1 of 2",
        ),
        ({"local_batch_size": 8}, r"plan\.micro_batch_size: makes 4 lines .*local_batch_size is 8"),
        ({"seq_len": 16}, r"max_length: makes lines of \d+ tokens, and training\.seq_len is 16"),
    ],
)
def test_what_torchtitan_would_train_otherwise_than_planned_is_refused(
    changed: dict[str, Any],
    said: str,
    tmp_path: Path,
    sample: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = client_of(tmp_path, sample, 0, 2, batch_size=32, micro_batch_size=4, tail="drop")
    with pytest.raises(ConfigError, match=said):
        next(iter(titan_of(served, monkeypatch, **changed)))
