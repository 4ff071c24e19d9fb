"""Steps of a tiny policy through SkyRL's own controller and worker, with its batches and with ours. Prints JSON.

    python skyrl_run.py FOLDER STEPS

What is SkyRL's own: `SFTTrainer.train_step`, `WorkerDispatch`, `PPORayActorGroup`, `MeshDispatch`, `PolicyWorkerBase.forward_backward` and
`optim_step`, `HFModelWrapper`, `DefaultCollator`. It needs CUDA in four places, and these are ours: the process group (NCCL), `torch.cuda.current_device`, the
optimizer step of its FSDP strategy, and the loading of the model.
"""

from __future__ import annotations

import json
import sys
import time
from types import SimpleNamespace
from typing import Any


def prepare() -> None:
    """What SkyRL needs on Python 3.11, in every process."""
    import typing

    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[misc]


def model_wrapper() -> Any:
    """SkyRL's `HFModelWrapper`, whose module imports two functions of flash_attn that only its unpadding calls."""
    from types import ModuleType

    import transformers.modeling_flash_attention_utils  # noqa: F401  # asks whether flash_attn is there

    names = ("flash_attn", "flash_attn.bert_padding")
    sys.modules.update({name: ModuleType(name) for name in names})
    vars(sys.modules[names[1]]).update(pad_input=None, unpad_input=None)
    from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper

    for name in names:
        del sys.modules[name]
    return HFModelWrapper


prepare()

import numpy as np  # noqa: E402
import ray  # noqa: E402
import torch  # noqa: E402
from skyrl.backends.skyrl_train.distributed import dispatch as their_dispatch  # noqa: E402
from skyrl.backends.skyrl_train.distributed.dispatch import MeshRank  # noqa: E402
from skyrl.backends.skyrl_train.distributed.strategy import DistributedStrategy  # noqa: E402
from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase, PPORayActorGroup  # noqa: E402
from skyrl.backends.skyrl_train.workers.worker_dispatch import WorkerDispatch  # noqa: E402
from skyrl.train.config import SkyRLTrainConfig  # noqa: E402
from skyrl.train.dataset.collators import DefaultCollator  # noqa: E402
from skyrl.train.sft_trainer import SFTTrainer  # noqa: E402

DP_SIZE, BATCH = 2, 8
PAD = 0


class CpuStrategy(DistributedStrategy):
    """What SkyRL's FSDP strategy does, with gloo: gradients are averaged over ranks."""

    world_size = DP_SIZE

    def backward(self, loss: torch.Tensor, model: Any, optimizer: Any, **_: Any) -> None:
        loss.backward()

    def optimizer_step(self, optimizer: Any, model: Any, scheduler: Any, **_: Any) -> torch.Tensor:
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= self.world_size
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        return norm

    def setup_distributed(self) -> None: ...
    def save_checkpoint(self, *_: Any) -> None: ...
    def load_checkpoint(self, *_: Any) -> None: ...
    def save_hf_model(self, *_: Any, **__: Any) -> None: ...


class CpuPolicyWorker(PolicyWorkerBase):
    """SkyRL's policy worker on a CPU."""

    def init_worker_process_group(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        torch.cuda.current_device = lambda: "cpu"
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo")
        self.device_mesh = init_device_mesh("cpu", (self._world_size, 1), mesh_dim_names=("dp", "sp"))
        self.mesh_rank = MeshRank(self._rank, 0, 0, 0, self._world_size, self._world_size, 1)

    def init_model(self) -> None:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=1100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, attn_implementation="sdpa",
        )  # fmt: skip
        self.model = model_wrapper()(Qwen2ForCausalLM(config).float())
        self.strategy = CpuStrategy()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, factor=1.0)


class Staged:
    """Stands where SkyRL's controller has its dispatch: a batch is a list of refs."""

    def __init__(self, dispatch: WorkerDispatch) -> None:
        self._dispatch = dispatch

    def forward_backward(self, model: str, refs: list[Any], loss_fn: str) -> Any:
        return self._dispatch.forward_backward_from_staged(model, refs, loss_fn=loss_fn)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dispatch, name)


def controller() -> tuple[SFTTrainer, WorkerDispatch, PPORayActorGroup]:
    """SkyRL's SFT trainer with new workers; none of its set-up that loads models and data."""
    cfg = SkyRLTrainConfig()
    cfg.trainer.micro_train_batch_size_per_gpu = 2
    cfg.trainer.algorithm.temperature = 1.0
    cfg.trainer.placement.colocate_all = cfg.trainer.placement.colocate_policy_ref = False
    group = PPORayActorGroup(cfg.trainer, DP_SIZE, 1, ray.remote(CpuPolicyWorker), num_gpus_per_actor=0.5)
    ray.get(group.async_run_ray_method("pass_through", "init_model"))
    dispatch = WorkerDispatch(cfg, group)
    trainer = SFTTrainer.__new__(SFTTrainer)
    trainer.dispatch = dispatch
    trainer.cfg = cfg
    return trainer, dispatch, group


def end(group: PPORayActorGroup) -> None:
    for actor in group._actor_handlers:
        ray.kill(actor)


class Put:
    """Counts what the driver puts into the object store."""

    def __init__(self) -> None:
        self.nbytes = 0

    def __call__(self, value: Any) -> Any:
        import pickle

        self.nbytes += len(pickle.dumps(value, protocol=5))
        return ray.put(value)


def through_skyrl(entry: Any, order: list[list[int]]) -> dict[str, Any]:
    """Losses of rows collated and dispatched by SkyRL."""
    trainer, _, group = controller()
    put = Put()
    their_dispatch.ray = SimpleNamespace(put=put, ObjectRef=ray.ObjectRef)
    collate = DefaultCollator(SimpleNamespace(pad_token_id=PAD), 2)
    losses, begin = [], time.perf_counter()
    for number, rows in enumerate(order):
        examples = []
        for row in map(entry.row, rows):
            ids, mask = [list(map(int, row[name])) for name in ("input_ids", "loss_mask")]
            first = mask.index(1)
            examples.append({
                "input_ids": ids, "attention_mask": [1] * len(ids), "loss_mask": mask[first:], "num_actions": len(ids) - first,
            })  # fmt: skip
        losses.append(trainer.train_step(collate(examples, BATCH), number)["loss"])
    wall_s = time.perf_counter() - begin
    end(group)
    return {"losses": losses, "wall_s": wall_s, "driver_bytes": put.nbytes}


def through_raysvc(name: str, steps: int) -> dict[str, Any]:
    """Losses of rows that a server collates; the controller is SkyRL's and gets refs."""
    import raysvc
    from raysvc.integrations.skyrl import BatchRules

    trainer, dispatch, group = controller()
    trainer.dispatch = Staged(dispatch)
    put = Put()
    their_dispatch.ray = SimpleNamespace(put=put, ObjectRef=ray.ObjectRef)
    losses, order = [], []
    policy = raysvc.Role(DP_SIZE, batches=BatchRules())
    with raysvc.attach(name, roles={"policy": policy}) as client:
        begin = time.perf_counter()
        for step in client.steps(stop=steps):
            for mini in step.mini_batches:
                losses.append(trainer.train_step(list(mini.shards), step.index)["loss"])
                order.append(mini.info.row_ids.tolist())
            client.commit(step.index)
        wall_s = time.perf_counter() - begin
    end(group)
    return {"losses": losses, "wall_s": wall_s, "driver_bytes": put.nbytes, "order": order}


def make_entry(folder: str, num_rows: int) -> str:
    """An entry whose rows are learnable: each token follows from the one before."""
    import pyarrow as pa

    from raysvc.cache.key import cache_key
    from raysvc.cache.store.open import open_store
    from raysvc.cache.writer import EntryWriter

    rng = np.random.default_rng(0)
    rows = []
    for _ in range(num_rows):
        row = [int(rng.integers(3, 900))]
        for _ in range(int(rng.integers(4, 30))):
            row.append((row[-1] * 7 + int(rng.integers(0, 3))) % 1000 + 3)
        rows.append(row)
    masks = [[0] * (first := int(rng.integers(1, 4))) + [1] * (len(row) - first) for row in rows]
    table = pa.table({
        "input_ids": pa.array(rows, pa.list_(pa.int32())),
        "loss_mask": pa.array(masks, pa.list_(pa.uint8())),
        "source_row": pa.array(np.arange(num_rows)),
    })  # fmt: skip
    recipe = {"rows": num_rows, "what": "skyrl_run"}
    writer = EntryWriter(open_store(folder), cache_key(recipe))
    writer.commit([writer.write_part(0, table, {})], recipe, {"vocab_size": 1003, "pad_token_id": PAD})
    return writer.uri


def main(folder: str, steps: int) -> None:
    import raysvc
    from raysvc.actors.launch import start_server
    from raysvc.actors.server.spec import ServeSpec
    from raysvc.job.config import PlanConfig

    ray.init(
        address="local", num_cpus=6, num_gpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False,
        runtime_env={"worker_process_setup_hook": prepare},
    )  # fmt: skip
    uri = make_entry(f"{folder}/cache", steps * BATCH)
    plan = PlanConfig(
        batch_size=BATCH,
        mini_batch_size=BATCH,
        micro_batch_size=2,
        layout="padded_left",
        columns=("input_ids", "loss_mask"),
    )
    server = start_server(
        ServeSpec(name="run", sources=[uri], plan=plan, pad_token_id=PAD, journal=f"{folder}/journal"),
        detached=False,
    )
    ours = through_raysvc("run", steps)
    theirs = through_skyrl(raysvc.open_entry(uri), ours.pop("order"))
    del server
    ray.shutdown()
    print(json.dumps({"ours": ours, "theirs": theirs}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
