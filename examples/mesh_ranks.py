"""Four processes, two data-parallel ranks of two peers, as a host makes them. `python examples/mesh_ranks.py HOST [FOLDER]`

HOST says who cuts lines for context parallelism, and how a process gets them:
- `fsdp2`: torch's `context_parallel` cuts whole lines, FSDP2 shards the weights;
- `torchtitan`: the calls of its trainer, which cuts whole lines;
- `megatron`: each rank for itself, lines cut by the server (`plan.cp_split`);
- `megatron_whole`: each rank for itself, lines cut by `get_batch_on_this_cp_rank`;
- `megatron_tp`: the peers are tensor-parallel ranks; the first one reads, and broadcasts.

The last four need torchtitan or megatron-core. The model gathers keys and values of its peers, so that it runs on CPUs.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import raysvc
from raysvc.cli.sample_data import write_job
from raysvc.integrations.row_tensors import moved_labels

DP, CP, LINES, WIDTH, VOCABULARY, LONGEST = 2, 2, 2, 16, 1024, 512
PLAN = {"batch_size": 16, "mini_batch_size": 8, "micro_batch_size": LINES, "tail": "drop", "epochs": 1}
PADDED = {"layout": "padded_right", "pad_to_multiple": 2 * CP}


class Part(NamedTuple):
    """What a process computes of a micro-batch, [B, L]; labels are -100 where there is no loss, places those on the line."""

    ids: torch.Tensor
    labels: torch.Tensor
    places: torch.Tensor
    targets: int  # of the whole mini-batch
    ends_mini: bool


class Host(NamedTuple):
    """A process as its host made it."""

    parts: Iterable[Part]
    peers: Any = None  # group whose parts make a line
    over: Any = None  # group over which gradients are summed; None: all processes
    shards: Any = None  # mesh over which FSDP2 shards weights, and averages gradients


def fsdp2(server: str) -> Host:
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (DP, CP), mesh_dim_names=("dp", "cp"))

    def parts() -> Iterator[Part]:
        with raysvc.attach_rank(server, mesh=mesh) as client:
            for micro in client.micro_batches():
                ids, labels = micro.tensors["input_ids"].long(), moved_labels(micro.tensors["labels"], CP)
                whole = [ids, labels, places_of(ids)]
                with context_parallel(mesh["cp"], buffers=whole, buffer_seq_dims=[1, 1, 1]):
                    yield Part(*whole, micro.denominators.tokens, micro.ends_mini)
                if micro.ends_step:
                    client.commit(micro.step)

    return Host(parts(), mesh.get_group("cp"), shards=mesh._flatten("all"))


def torchtitan(server: str) -> Host:
    """Like `Trainer.__init__`, `train_step` and `post_dataloading_process`."""
    from torchtitan.components.loss import IGNORE_INDEX
    from torchtitan.config.configs import ParallelismConfig
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.distributed.context_parallel import prepare_context_parallel_input

    from raysvc.integrations.titan_loader import ServerLoader

    parallel_dims.device_type = "cpu"  # torchtitan knows accelerators alone
    parallelism = ParallelismConfig(data_parallel_shard_degree=DP, context_parallel_degree=CP)
    dims = ParallelDims.from_config(parallelism, DP * CP)
    batch, cp = dims.get_mesh("batch"), dims.get_mesh("cp")
    loader = ServerLoader.Config(server=server, parallelism=parallelism).build(
        dp_world_size=DP, dp_rank=batch.get_local_rank(), tokenizer=None, seq_len=LONGEST,
        local_batch_size=LINES, snapshot_every_n_steps=None,
    )  # fmt: skip

    def parts() -> Iterator[Part]:
        items = iter(loader)
        accumulated = PLAN["mini_batch_size"] // (LINES * DP)
        for _ in range(len(loader) // accumulated):
            mini = [next(items) for _ in range(accumulated)]
            targets = sum((labels != IGNORE_INDEX).sum() for _, labels in mini)
            dist.all_reduce(targets, group=batch.get_group())
            for number, (inputs, labels) in enumerate(mini, 1):
                more = {"positions": places_of(labels)}
                ids, labels, more = prepare_context_parallel_input(inputs["input"], labels, more, cp, "cpu")
                yield Part(ids, labels, more["positions"], int(targets), number == accumulated)
        next(items, None)  # commits the last step
        loader.client.detach()

    return Host(parts(), cp.get_group(), shards=dims.get_mesh("loss"))


def megatron(server: str, whole: bool = False, tp: int = 1) -> Host:
    """`whole`: lines are cut here; `tp`: so many ranks get what one of them reads."""
    from megatron.core import parallel_state as state
    from megatron.core.utils import get_batch_on_this_cp_rank

    from raysvc.integrations.megatron import megatron_batch

    state.initialize_model_parallel(tp, context_parallel_size=CP // tp)
    reads = state.get_tensor_model_parallel_rank() == 0
    first, peers = state.get_tensor_model_parallel_src_rank(), state.get_tensor_model_parallel_group()

    def parts() -> Iterator[Part]:
        with raysvc.attach_rank(server, mesh="launched", columns=None if reads else []) as client:
            for micro in client.micro_batches():
                batch = [megatron_batch(micro.tensors, client) if reads else None]
                dist.broadcast_object_list(batch, first, peers)
                own: dict[str, Any] = {"places": places_of(batch[0]["tokens"]), **batch[0]}
                if whole:
                    own = get_batch_on_this_cp_rank(own)
                elif tp == 1:  # what the server gave: the chunk of this rank, and the one as far from the end
                    number, length = client.coords.cp, own["places"].shape[1] // 2
                    own["places"][:, :length] += number * length
                    own["places"][:, length:] += (2 * CP - 2 - number) * length
                labels = own["labels"].where(own["loss_mask"] > 0, -100)
                yield Part(own["tokens"], labels, own["places"], micro.denominators.tokens, micro.ends_mini)
                if micro.ends_step:
                    client.commit(micro.step)

    over = state.get_data_parallel_group(with_context_parallel=True)
    return Host(parts(), state.get_context_parallel_group(), over)


HOSTS = {
    "fsdp2": fsdp2,
    "torchtitan": torchtitan,
    "megatron": megatron,
    "megatron_whole": lambda server: megatron(server, whole=True),
    "megatron_tp": lambda server: megatron(server, tp=2),
}


def places_of(ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(ids.shape[1]).repeat(len(ids), 1)


class Gathered(torch.autograd.Function):
    """The parts of all peers, next to each other."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, peers: Any) -> torch.Tensor:
        ctx.peers, parts = peers, [torch.empty_like(own) for _ in range(dist.get_world_size(peers))]
        dist.all_gather(parts, own.contiguous(), peers)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (whole,) = (each.contiguous() for each in gradients)
        dist.all_reduce(whole, group=ctx.peers)
        return whole.chunk(dist.get_world_size(ctx.peers), 1)[dist.get_rank(ctx.peers)], None


class Model(torch.nn.Module):
    """One layer of causal attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Embedding(LONGEST, WIDTH)
        self.qkv, self.head = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def forward(self, part: Part, peers: Any) -> torch.Tensor:
        hidden = self.tokens(part.ids) + self.places(part.places)
        queries, keys, values = self.qkv(hidden).chunk(3, -1)
        everywhere = part.places
        if peers is not None:
            keys, values, everywhere = (Gathered.apply(each, peers) for each in (keys, values, everywhere))
        later = part.places[:, :, None] < everywhere[:, None, :]
        scores = (queries @ keys.mT / WIDTH**0.5).masked_fill(later, -1e9)
        logits: torch.Tensor = self.head(hidden + scores.softmax(-1) @ values)
        return logits


def train(host: Host) -> dict[str, Any]:
    """Train on all parts; returns the loss of each mini-batch, and the sum of the weights."""
    from torch.distributed.fsdp import fully_shard

    model, together, losses = Model(), dist.is_initialized(), [0.0]
    if host.shards is not None:
        fully_shard(model, mesh=host.shards)
    averaged = 1 if host.shards is None else host.shards.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for part in host.parts:
        logits = model(part, host.peers).flatten(0, 1)
        total = torch.nn.functional.cross_entropy(logits, part.labels.flatten(), reduction="sum")
        (total * averaged / part.targets).backward()
        losses[-1] += total.detach() / part.targets
        if part.ends_mini:
            if together:
                dist.all_reduce(losses[-1], group=host.over)
            for weight in model.parameters() if together and host.shards is None else ():
                dist.all_reduce(weight.grad, group=host.over)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(0.0)
    whole = [getattr(weight, "full_tensor", lambda kept=weight: kept)() for weight in model.parameters()]
    return {
        "losses": [float(loss) for loss in losses[:-1]],
        "weights": float(sum(each.abs().sum() for each in whole)),
    }


def alone(job: Path) -> Host:
    """One process, and the job without a server."""

    def parts() -> Iterator[Part]:
        for micro in raysvc.load(job).micro_batches():
            ids, labels = (micro.tensors[name].long() for name in ("input_ids", "labels"))
            labels = torch.cat([labels[:, 1:], torch.full((len(labels), 1), -100)], 1)
            yield Part(ids, labels, places_of(ids), micro.denominators.tokens, micro.ends_mini)

    return Host(parts())


@ray.remote(num_cpus=0.25)
class Rank:
    """A process of torchrun."""

    def __init__(self, rank: int, ranks: int, port: int) -> None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def train(self, name: str, server: str) -> dict[str, Any]:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        result = train(HOSTS[name](server))
        dist.destroy_process_group()
        return result


def main(name: str, folder: Path) -> dict[str, Any]:
    job = write_job(folder, 64, plan=PLAN | PADDED)
    cut = {"plan": {"cp_split": "head_tail"}} if name == "megatron" else {}
    server = raysvc.serve(job, name=name, detached=False, **cut)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = [Rank.remote(rank, DP * CP, port) for rank in range(DP * CP)]
    return {
        "ranks": ray.get([rank.train.remote(name, server.name) for rank in ranks]),
        "alone": train(alone(job)),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2] if sys.argv[2:] else tempfile.mkdtemp()))))
