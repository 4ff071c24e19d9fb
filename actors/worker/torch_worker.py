"""The shipped worker: `transformers` language models and critics with DDP or FSDP2.

Axes: B lines of a micro-batch, L its width, V vocabulary.

Always true:
- the loss of a position is weighted by the mini-batch's denominators, so the gradient does not depend on
  dp_size, micro-batching, padding or packing;
- all ranks start from the same weights: the first one reads or makes them, and gives them out (`spread.py`);
- weights of losses and the losses themselves stay float32 in mixed precision;
- a model sees a layout only with inputs under which it was seen, when it was loaded, to keep the rows apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict

from raysvc.actors.model.load_model import load_lm
from raysvc.actors.model.tiny_vision import TinyVision
from raysvc.actors.staging.staging import StagingOptions
from raysvc.actors.worker.losses import (
    ROW_INDEX,
    ROW_LOSS,
    DistillLoss,
    Loss,
    LossSum,
    SftLoss,
    StepLoss,
    ValueLoss,
)
from raysvc.actors.worker.lr_schedule import LearningRate
from raysvc.actors.worker.results import Metrics
from raysvc.actors.worker.row_losses import (
    MISMATCHED,
    KtoLoss,
    PairLoss,
    RewardLoss,
    RowLoss,
)
from raysvc.actors.worker.worker import Worker
from raysvc.cache.store.disk_failures import named_failures
from raysvc.chat.garbage import no_collection
from raysvc.collate.columns import IGNORED
from raysvc.collate.row_values import RowValues
from raysvc.collate.shard import BOUNDS, Shard
from raysvc.errors import ConfigError
from raysvc.job.config import Reduction
from raysvc.job.plan_config import Layout

if TYPE_CHECKING:
    import torch

    from raysvc.actors.model.row_isolation import Proof
    from raysvc.actors.model.token_model import TokenModel
    from raysvc.actors.worker.spread import LoadedModel


class ModelSpec(BaseModel):
    """Holds what a `CausalLMWorker` trains, and how.

    Attributes:
        model: `tiny`, `tiny-vision`, a folder, or a hub name.
        vocab_size: of the tokenizer; only the tiny ones use it.
        vision: of `tiny-vision`.
        learning_rate: where there is no schedule.
        max_grad_norm: None: no clipping.
        loss: which mean over a mini-batch.
        loss_constant: tokens that `constant` divides every row by.
        own_loss: what is trained where a call names no loss; None: `SftLoss`, of a critic `ValueLoss`.
        role: `policy` and `critic` are trained, a `reference` runs forward only.
        strategy: what holds the weights on several ranks: a copy each (`ddp`) or a share each (`fsdp`, FSDP2).
        precision: `bf16`: float32 weights, bfloat16 forward and backward.
        gradient_checkpointing: keep what enters each layer, and compute its activations again in the backward pass.
        schedule: learning rate by optimizer step; None: `learning_rate`, or what `set_lr` says.
        staging: how shards are staged.
        layouts: that shards may have.
    """

    model_config = ConfigDict(frozen=True, protected_namespaces=())
    model: str
    vocab_size: int
    learning_rate: float
    weight_decay: float
    max_grad_norm: float | None
    loss: Reduction
    seed: int
    loss_constant: float | None = None
    own_loss: StepLoss | PairLoss | KtoLoss | RewardLoss | DistillLoss | None = (
        None  # of equals pydantic takes the first
    )
    role: Literal["policy", "critic", "reference"] = "policy"
    strategy: Literal["ddp", "fsdp"] = "ddp"
    precision: Literal["fp32", "bf16"] = "fp32"
    gradient_checkpointing: bool = False
    schedule: LearningRate | None = None
    staging: StagingOptions = StagingOptions()
    vision: TinyVision | None = None
    layouts: tuple[str, ...] = get_args(Layout)


class CausalLMWorker(Worker):
    """Trains a causal LM, or a critic with one value per token."""

    def __init__(self, rank: int, dp_size: int, device: str, spec_json: str) -> None:
        self.spec = ModelSpec.model_validate_json(spec_json)
        spec = self.spec
        super().__init__(
            rank, dp_size, device, spec.loss, staging=spec.staging, loss_constant=spec.loss_constant
        )
        self.max_grad_norm = self.spec.max_grad_norm
        self.learning_rate = self.spec.schedule
        self._own_loss: Loss | RowLoss | None = self.spec.own_loss or (
            ValueLoss() if self.spec.role == "critic" else None
        )
        self._num_entries = self.spec.vocab_size  # of the model
        self._shared: dict[str, torch.Tensor] = {}  # numbers of the mini-batch that is trained
        self._proofs: dict[str, Proof] = {}  # layout -> which inputs keep its rows apart

    def build(self) -> None:
        """Load the model, prove that it keeps rows apart, and spread it over the ranks.

        Raises:
            ConfigError: the folder of the model is not on this node, its rows would see each other in every layout, or it names
                no layers whose activations could be computed again.
        """
        with no_collection():
            import torch

            from raysvc.actors.worker.adamw import PlainAdamW, decay_groups
            from raysvc.actors.worker.spread import load_once

        torch.manual_seed(self.spec.seed)
        loaded = load_once(self._make, self._proved, self.rank, self.dp_size)
        module, self._proofs = loaded.module, loaded.found
        self._num_entries = int(module.lm.config.get_text_config().vocab_size)
        if self.spec.role == "reference":
            module.requires_grad_(False)
        elif self.spec.gradient_checkpointing:
            recompute_layers(module.lm)
        self.model = self._spread(loaded)
        if self.spec.role != "reference":
            groups = decay_groups(self.model, self.spec.weight_decay)
            self.optimizer = PlainAdamW(groups, lr=self.spec.learning_rate)

    def _make(self) -> TokenModel:
        """The whole model on the device."""
        with no_collection():
            from raysvc.actors.model.token_model import TokenModel

        lm: Any = self.load_lm()
        critic, of_steps = self.spec.role == "critic", isinstance(self.spec.own_loss, StepLoss)
        return TokenModel(lm.to(self.device).train(), critic, of_steps)

    def _proved(self, module: TokenModel) -> dict[str, Proof]:
        """Proves each layout, in the type of the weights, before the model is spread over the ranks."""
        from raysvc.actors.model.row_isolation import mixes_rows, prove

        def outputs_of(inputs: dict[str, Any]) -> torch.Tensor:
            rows_TD, head = module.rows_and_head(inputs)
            out: torch.Tensor = head(rows_TD).unflatten(0, (len(inputs["input_ids"]), -1))
            return out

        proofs = {layout: prove(outputs_of, module.lm, layout) for layout in self.spec.layouts}
        if all(proof.inputs is None for proof in proofs.values()):
            raise mixes_rows(self.spec.model, *next(iter(proofs.items())))
        return proofs

    def load_lm(self) -> torch.nn.Module:
        """The model, in host memory; override it for another way to make one. Of several ranks the first one is asked, and `pickle`
        has to take what it gives.

        Raises:
            ConfigError: the folder of the model is not on this node.
        """
        # not in the dtype of its files: bfloat16 weights lose small updates
        spec = self.spec
        return load_lm(spec.model, spec.vocab_size, critic=spec.role == "critic", vision=spec.vision)

    def micro_loss(
        self, tensors: dict[str, torch.Tensor], layout: str, loss: Loss | RowLoss | None
    ) -> LossSum:
        """Weighted sum of the losses of one micro-batch."""
        known: dict[str, torch.Tensor] = {}
        own = loss is None
        loss = (self._own_loss or SftLoss()) if loss is None else loss
        if own and isinstance(loss, SftLoss | DistillLoss | StepLoss):
            tensors = {**tensors, ROW_INDEX: row_index(tensors)}
            loss = replace(loss, num_rows=len(tensors["seq_lengths"]))
            known = {ROW_LOSS: tensors["loss_weights"].new_zeros(loss.num_rows)}  # where no row has a target
        rows = (
            rows_of(tensors, loss.row_columns, loss.weigh) | self._shared
            if isinstance(loss, RowLoss)
            else None
        )
        with self._precision():
            total, metrics = self.model(
                self._inputs(tensors, layout),
                tensors["labels"].long(),
                tensors["loss_weights"],
                {name: column_of(tensors, name) for name in loss.columns},
                loss,
                rows,
            )
        return LossSum(total, {**known, **metrics})

    def _prepared(self, shard: Shard, columns: RowValues | None, loss_weight: float) -> Shard:
        if self._num_entries < self.spec.vocab_size:
            refuse_unknown_ids(shard, self._num_entries)
        return super()._prepared(shard, columns, loss_weight)

    def _losses(
        self, shard: Shard, loss: Loss | RowLoss | None, *, backward: bool
    ) -> tuple[Metrics, RowValues | None]:
        wanted = self._own_loss if loss is None else loss
        self._shared = {}
        if isinstance(wanted, KtoLoss):
            self._shared = self._of_labels(shard)
        if isinstance(wanted, DistillLoss):
            refuse_unknown_entries(shard, self._num_entries)
        return super()._losses(shard, loss, backward=backward)

    def _of_labels(self, shard: Shard) -> dict[str, torch.Tensor]:
        """Returns z of `KtoLoss` and the share of good rows, of the mini-batch over all ranks: a forward before those
        that have a gradient.
        """
        import torch
        import torch.distributed as dist

        sums = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for index in range(len(shard.micro_batches)):
                found = self.micro_loss(shard.micro(index), shard.layout, MISMATCHED)
                sums += torch.stack([found.total, found.metrics["desirable"]]).double().cpu()
        if dist.is_initialized():
            sums = sums.to(self.device)
            dist.all_reduce(sums)
        kl, share = sums / max(shard.denominators.groups, 1)
        return {"mismatched_kl": kl.clamp(min=0), "desirable_share": share}

    def micro_forward(self, tensors: dict[str, torch.Tensor], layout: str) -> dict[str, torch.Tensor]:
        """`logprobs` and `entropy` (critic: `values`) at every target, 0 elsewhere."""
        with self._precision():
            _, outputs = self.model(
                self._inputs(tensors, layout), tensors["labels"].long(), tensors["loss_weights"], {}, None
            )
        return dict(outputs)

    def save_checkpoint(self, folder: str) -> None:
        """Write this rank's part of a checkpoint into an existing folder.

        Raises:
            StoreError: the disk is full, or cannot be written.
        """
        from raysvc.actors.model import hf_model
        from raysvc.actors.worker import checkpoint

        with named_failures(Path(folder)):
            if self.rank == 0:
                hf_model.save_config(self.model, Path(folder))
            checkpoint.save(Path(folder), self.rank, self.model, self.optimizer, self.optimizer_steps)

    def load_checkpoint(self, folder: str) -> None:
        """Read what `save_checkpoint` wrote; dp_size and strategy may differ."""
        from raysvc.actors.worker import checkpoint

        self.optimizer_steps = checkpoint.load(Path(folder), self.rank, self.model, self.optimizer)

    def save_hf_model(self, folder: str) -> None:
        """Write the model as `transformers` reads it; rank 0 writes, all ranks call it."""
        from raysvc.actors.model import hf_model
        from raysvc.actors.worker import checkpoint

        weights = checkpoint.full_weights(self.model)
        if self.rank == 0:
            with named_failures(Path(folder)):
                hf_model.save_weights(self.model, weights, Path(folder))

    def export_weights(self) -> dict[str, Any] | None:
        """The whole model as numpy arrays with their torch dtype (bfloat16 as uint16); None but on rank 0."""
        import torch

        from raysvc.actors.worker import checkpoint

        weights = checkpoint.full_weights(self.model)
        if self.rank:
            return None
        bf16 = torch.bfloat16
        return {
            name: (str(w.dtype), (w.view(torch.uint16) if w.dtype == bf16 else w).numpy())
            for name, w in weights.items()
        }

    def import_weights(self, weights: dict[str, Any]) -> None:
        """Take over the weights of another group's `export_weights`."""
        import torch

        from raysvc.actors.worker import checkpoint

        full = {}
        for name, (dtype, array) in weights.items():
            tensor = torch.tensor(array)
            full[name] = tensor.view(torch.bfloat16) if dtype == "torch.bfloat16" else tensor
        checkpoint.load_full_weights(self.model, full)

    def place(self, part: Literal["model", "optimizer"], on_device: bool) -> None:
        """Bring weights and gradients, or the optimizer's state, to the device or to host memory."""
        import torch

        target = self.device if on_device else "cpu"
        if part == "model":
            self.model.to(target)
        elif self.optimizer is not None:
            for state in self.optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) and value.dim():  # step counters stay where they are
                        state[name] = value.to(target)
        if self.device.startswith("cuda") and not on_device:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _spread(self, loaded: LoadedModel) -> torch.nn.Module:
        """The module on all ranks, with its weights."""
        if self.dp_size == 1:
            return loaded.module
        import torch

        from raysvc.actors.worker.spread import give_out

        if not self._averages:
            with no_collection():
                import torch._dynamo  # DDP and FSDP import it
        module, sharded = loaded.module, self.spec.strategy == "fsdp"
        if sharded:
            module = _sharded(module, self.device, self.dp_size, self.spec.precision == "bf16")
        give_out(module, loaded.weights, self.device)
        if sharded or self._averages or self.spec.role == "reference":
            return module  # DDP refuses a module without gradients
        # an encoder may have layers that the language model does not look at, as in LLaVA
        unused = any(hasattr(module.lm.config, name) for name in ("vision_config", "audio_config"))
        return torch.nn.parallel.DistributedDataParallel(module, find_unused_parameters=unused)

    def _inputs(self, tensors: dict[str, torch.Tensor], layout: str) -> dict[str, Any]:
        from raysvc.actors.model.row_isolation import mixes_rows

        proof = self._proofs[layout]
        if proof.inputs is None:
            raise mixes_rows(self.spec.model, layout, proof)
        inputs = proof.inputs(tensors)
        if not any(name.endswith(BOUNDS) for name in tensors):
            return inputs
        from raysvc.actors.model.media_inputs import media_inputs

        lm = getattr(self.model, "module", self.model).lm
        return {**inputs, **media_inputs(lm, tensors, row_index(tensors))}

    def _precision(self) -> AbstractContextManager[Any]:
        import torch

        if self.spec.precision == "fp32" or (self.spec.strategy == "fsdp" and self.dp_size > 1):
            return nullcontext()  # FSDP has its own
        context: AbstractContextManager[Any] = torch.autocast(self.device.split(":")[0], torch.bfloat16)
        return context

    @property
    def _averages(self) -> bool:
        """Returns whether the ranks average their gradients themselves, after the backward pass."""
        return self.dp_size > 1 and self.spec.strategy == "ddp" and self.device == "cpu"

    def _reduce(self) -> None:
        if self._averages:
            from raysvc.actors.worker.replicas import average_gradients, share_buffers

            average_gradients(self.model)
            share_buffers(self.model)

    def _no_sync(self) -> AbstractContextManager[None]:
        if hasattr(self.model, "set_requires_gradient_sync"):
            return _unsynced(self.model)
        return super()._no_sync()


@contextmanager
def _unsynced(model: Any) -> Iterator[None]:
    """FSDP2's `no_sync`: gradients stay whole and unreduced on every rank."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def _sharded(module: Any, device: str, dp_size: int, bf16: bool) -> torch.nn.Module:
    """FSDP2: every decoder layer a unit, the rest (embedding, norm, head) another."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.split(":")[0], (dp_size,))
    dtype = torch.bfloat16 if bf16 else None
    reduce = torch.float32 if bf16 else None
    for layer in _layers(module.lm):
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(dtype, reduce))
    # casting the root's inputs would round loss weights and advantages to 8 bits
    root = MixedPrecisionPolicy(dtype, reduce, cast_forward_inputs=False)
    sharded: torch.nn.Module = fully_shard(module, mesh=mesh, mp_policy=root)
    return sharded


def recompute_layers(lm: Any) -> None:
    """Let each decoder layer keep what enters it alone, and compute its activations again in the backward pass.

    Inside of the unit that FSDP2 makes of a layer, whose weights are gathered once for both passes.

    Raises:
        ConfigError: the model names no layers.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    def recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*arguments, **named)
            return checkpoint(forward, *arguments, use_reentrant=False, **named)

        return run

    layers = _layers(lm)
    if not layers:
        what = f"{type(lm).__name__} does not say what its layers are (_no_split_modules)"
        raise ConfigError("trainer.gradient_checkpointing", what, "leave it out, or train with HF Trainer")
    for layer in layers:
        layer.forward = recomputed(layer.forward)


def _layers(lm: Any) -> list[Any]:
    """The modules that a model says to keep whole; of those inside of another one, the outer."""
    names, inner, found = set(lm._no_split_modules or ()), set(), []
    for module in lm.modules():  # outer ones first
        if type(module).__name__ in names and module not in inner:
            found.append(module)
            inner.update(module.modules())
    return found


def row_index(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """[B, L] int64, number of each token's row in the micro-batch; padding has that of the row before it."""
    import torch

    lines, width = tensors["input_ids"].shape
    device = tensors["input_ids"].device
    if "cu_seqlens_offsets" not in tensors:
        return torch.arange(lines, device=device)[:, None].expand(lines, width)
    bounds, offsets = tensors["cu_seqlens"].long(), tensors["cu_seqlens_offsets"].long()
    offsets = offsets - offsets[0]
    line = torch.arange(lines, device=device).repeat_interleave(offsets.diff(), output_size=len(bounds))
    cells = line * width + bounds
    cells[offsets[1:] - 1] = lines * width  # the end of a line begins no row
    begins = torch.zeros(lines * width + 1, dtype=torch.int64, device=device)
    begins.index_fill_(0, cells, 1)
    return begins[:-1].cumsum(0).view(lines, width) - 1


def rows_of(
    tensors: dict[str, torch.Tensor], columns: tuple[str, ...], weigh: str = "group"
) -> dict[str, torch.Tensor]:
    """Returns what a loss of rows needs to know of the rows of a micro-batch; see `TokenModel.forward`."""
    import torch

    index_BL = row_index(tensors)
    there = tensors["segment_ids" if "segment_ids" in tensors else "attention_mask"] > 0
    cells = torch.arange(index_BL.numel(), device=index_BL.device).view(index_BL.shape)
    last_S = cells.new_zeros(len(tensors["group_weights"]))
    last_S = last_S.scatter_reduce(0, index_BL[there], cells[there], "amax")
    found = {"row_BL": index_BL, "last_S": last_S, "weights_S": tensors[f"{weigh}_weights"]}
    return found | {name: _known(tensors, name) for name in columns}


def refuse_unknown_ids(shard: Shard, num_entries: int) -> None:
    """Refuse tokens that the model does not have; a tokenizer may have more, which no row uses.

    Args:
        shard: in host memory.
        num_entries: of the model.

    Raises:
        ConfigError: a row or its padding has one.
    """
    import torch

    ids_BL = shard.arrays["input_ids"]
    if not ids_BL.size or int(ids_BL.max()) < num_entries:
        return
    line, cell = np.argwhere(ids_BL >= num_entries)[0].tolist()
    names = ("input_ids", "cu_seqlens", "cu_seqlens_offsets")
    arrays = {name: torch.from_numpy(shard.arrays[name]) for name in names if name in shard.arrays}
    index_BL = row_index(arrays)
    row = int(shard.row_ids[int(index_BL[line, cell])])
    what = f"has {num_entries} entries, and row {row} or its padding the id {int(ids_BL[line, cell])}"
    raise ConfigError("trainer.model", what, "give a model of the tokenizer that the rows were made with")


def refuse_unknown_entries(shard: Shard, vocab_size: int) -> None:
    """Refuse a teacher's entries that the model does not have: on a CPU they end in an error of torch that names no row, on
    CUDA in one that ends the process.

    Args:
        shard: on any device.
        vocab_size: of the model that is trained.

    Raises:
        ConfigError: a target has one.
    """
    import torch

    if "teacher_ids" not in shard.arrays:
        return  # `_known` says so
    ids_BLK: Any = shard.arrays["teacher_ids"]
    ids_BLK = ids_BLK if ids_BLK.dtype.is_signed else ids_BLK.long()  # torch compares no uint16 to uint64
    if not ids_BLK.numel() or int(ids_BLK.max()) < vocab_size:
        return
    unknown = (ids_BLK >= vocab_size) & (shard.arrays["labels"] != IGNORED)[..., None]
    found = torch.nonzero(unknown)
    if len(found):
        line, cell, entry = found[0].tolist()
        row = int(shard.row_ids[int(row_index(shard.arrays)[line, cell])])
        what = f"row {row} has the id {int(ids_BLK[line, cell, entry])}, and the model that is trained has {vocab_size} entries"
        remedy = "take a teacher with the tokenizer of the rows, or write -1 for what the model does not have"
        raise ConfigError("column 'teacher_ids'", what, remedy)


def column_of(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """A column per token; one per row is spread over its tokens."""
    found = _known(tensors, name)
    return found[row_index(tensors)] if found.dim() == 1 else found


def _known(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in tensors:
        there = ", ".join(sorted(tensors))
        remedy = "name it in plan.columns, or give it with the call"
        raise ConfigError(f"column {name!r}", f"the loss needs it, the shard has {there}", remedy)
    return tensors[name]
