"""The `Trainer` of `transformers`, and its subclasses, on a batch server. Extra: `raysvc[hf]`.

    class MyTrainer(FromServer, Trainer):
        client = raysvc.attach_rank("sft-1", dp_size=world_size, rank=rank)

Always true:
- one optimizer step of the Trainer is one mini-batch, however many micro-batches a rank has of it;
- the loss is divided by the targets of the whole mini-batch over all ranks;
- a step is committed after its last optimizer step, so a checkpoint, saved after that, holds the frontier;
- with `resume_from_checkpoint` the checkpoint's frontier wins over the server's, without one step 0 does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from raysvc.actors.model.row_isolation import model_inputs
from raysvc.collate.columns import IGNORED
from raysvc.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import Trainer as _Host

    from raysvc.client.rank_client import MicroBatch, RankClient
    from raysvc.loader import Loader
else:
    _Host = object

Inputs = dict[str, Any]  # mostly tensors
ROWS = "raysvc_rows"
# options of any trainer that the plan or the server decides: what leaves it to them, why, what to use
DECIDED: dict[str, tuple[Any, str, str]] = {
    "dataloader_num_workers": (
        0,
        "the server reads ahead",
        "leave it out, and use look_ahead_steps of attach",
    ),
    "dataloader_drop_last": (False, "the plan decides what happens to the last rows", "use plan.tail"),
    "train_sampling_strategy": ("random", "the plan orders rows", "leave it out, and use plan.shuffle"),
    "data_seed": (None, "the plan orders rows", "leave it out, and use plan.seed"),
    "auto_find_batch_size": (False, "the plan cuts micro-batches", "use a lower plan.micro_batch_tokens"),
    "restore_callback_states_from_checkpoint": (
        False,
        "it would replace the data's frontier",
        "leave it out",
    ),
}
BY_PLAN = {
    "per_device_train_batch_size": (
        8,
        "the plan cuts micro-batches",
        "leave it out, and use plan.micro_batch_size",
    )
}


class FromServer(_Host):  # type: ignore[misc]  # a Trainer comes after it
    """Put it before a `Trainer` class, and set `client`.

    `TrainingArguments` keep their defaults for what the plan decides: `gradient_accumulation_steps=1`, and
    `num_train_epochs=1` (or `max_steps`), because the plan counts epochs.

    Attributes:
        client: of this rank.
        columns: what `compute_loss` gets beside the model's own inputs: columns of the shards, in the type and shape of
            `MicroBatch.tensors`. Take them out of `inputs` there before the model is called.
        row_losses: report the loss of each row with its step, for `raysvc why`; the model has to return logits.
    """

    client: RankClient | Loader
    columns: Sequence[str] = ()
    row_losses: bool = False
    # row ids, losses and targets of the rows of micro-batches since the last commit
    _untold: list[tuple[Any, Any, Any]]
    _inputs_of: Mapping[str, Callable[[Mapping[str, Any]], Inputs]] = {}  # of each layout that came

    def get_train_dataloader(self) -> MiniBatches:
        """The mini-batches of this rank, from the frontier on."""
        self._refuse()
        self.args.ignore_data_skip = True  # the server goes on at the frontier, nothing has to be skipped
        self._untold = []
        minis = MiniBatches(self.client, self.batch_of, self._tell)
        self.remove_callback(Frontier)  # of an earlier train()
        self.add_callback(Frontier(minis))
        return minis

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: Any
    ) -> tuple[list[Any], Any]:
        """One mini-batch, and its targets over all ranks."""
        mini = next(epoch_iterator, None)
        if mini is None:
            return [], None
        ranks = 1 if self.args.average_tokens_across_devices else self.args.world_size
        return [mini], mini["num_tokens"] / ranks

    def batch_of(self, micro: MicroBatch) -> Inputs:
        """Returns what `compute_loss` gets of a micro-batch: what keeps its rows apart in the model, labels, and `columns`.

        Raises:
            ConfigError: the model does not keep the rows of this layout apart, or the shard has no such column.
        """
        if micro.layout not in self._inputs_of:
            self._inputs_of = {**self._inputs_of, micro.layout: model_inputs(self.model, micro.layout)}
        inputs = self._inputs_of[micro.layout](micro.tensors)
        rows = {ROWS: (micro.tensors["row_ids"], micro.tensors["row_tokens"])} if self.row_losses else {}
        return inputs | {"labels": micro.tensors["labels"].long()} | declared(micro, self.columns) | rows

    def compute_loss(
        self, model: Any, inputs: Inputs, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of the host; that of each row is kept until the step is committed.

        Raises:
            ConfigError: `row_losses` is set, and the model returns no logits.
        """
        if ROWS not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        labels = inputs["labels"]
        row_ids, row_tokens = inputs[ROWS]
        host = {name: value for name, value in inputs.items() if name != ROWS}
        loss, outputs = super().compute_loss(model, host, True, num_items_in_batch)
        if (logits := getattr(outputs, "logits", None)) is None:
            raise ConfigError("row_losses", "needs logits, and this model returns none", "leave it out")
        sums = _row_sums(logits.detach(), labels, row_tokens)
        self._untold.append(
            tuple(values[row_ids >= 0].cpu().numpy() for values in (row_ids, sums, row_tokens))
        )
        return (loss, outputs) if return_outputs else loss

    def _tell(self, step: int) -> None:
        """Report the rows of a step that is trained."""
        if self._untold:
            rows, sums, targets = (np.concatenate(each) for each in zip(*self._untold, strict=True))
            cast("RankClient", self.client).report_rows(step, rows, loss=sums, targets=targets)
        self._untold = []

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Any:
        """Forward and backward of every micro-batch; gradients are reduced with the last one."""
        *others, last = inputs["micro_batches"]
        total = 0.0
        for micro in others:
            with self.accelerator.no_sync(model=model):
                total = total + super().training_step(model, micro, num_items_in_batch)
        return total + super().training_step(model, last, num_items_in_batch)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Returns the operations of all micro-batches."""
        return sum(super(FromServer, self).floating_point_ops(micro) for micro in inputs["micro_batches"])

    def _refuse(self) -> None:
        args = self.args
        refuse_decided(args, {**DECIDED, **BY_PLAN})
        if self.row_losses and not hasattr(self.client, "report_rows"):
            raise ConfigError(
                "row_losses", "are kept by a server, and a loader has none", "attach, or leave it out"
            )
        if args.gradient_accumulation_steps != 1:
            what = f"is {args.gradient_accumulation_steps}, and a mini-batch is one optimizer step already"
            raise ConfigError("gradient_accumulation_steps", what, "use 1, and plan.mini_batch_size")
        if args.max_steps < 0 and args.num_train_epochs != 1:
            what = f"is {args.num_train_epochs:g}, and the plan counts epochs"
            raise ConfigError("num_train_epochs", what, "use 1, and plan.epochs")
        if not self._takes_a_mean() and not self.model_accepts_loss_kwargs and self.compute_loss_func is None:
            what = f"{type(self.model).__name__} takes no num_items_in_batch, so its loss is a mean of means"
            raise ConfigError("Trainer(model)", what, "give compute_loss_func")

    def _takes_a_mean(self) -> bool:
        """Returns whether `compute_loss` weighs the mean of a micro-batch itself."""
        return False


class MiniBatches:
    """A loader of mini-batches: `micro_batches`, a list of model inputs, and `num_tokens`, their targets over all ranks.

    `len` counts the mini-batches of the whole run, as the Trainer's schedules want it.
    """

    def __init__(
        self,
        client: RankClient | Loader,
        batch_of: Callable[[MicroBatch], Inputs],
        before_commit: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.client, self._batch_of, self._before_commit = client, batch_of, before_commit
        self._trained = 0  # mini-batches of the step at the frontier that are trained
        self._ends_step = False  # of the one that was given last

    def __len__(self) -> int:
        schedule = self.client.schedule
        return schedule.optimizer_steps // schedule.update_epochs

    @property
    def optimizer_steps(self) -> int:
        """The optimizer steps of the whole run."""
        return len(self)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        begin, passed = (self.client.next_step, self._trained), []
        for micro in self.client.micro_batches():
            if (micro.step, micro.mini) < begin:
                continue
            passed.append(self._batch_of(micro))
            if micro.ends_mini:
                self._ends_step = micro.ends_step
                yield {"micro_batches": passed, "num_tokens": micro.denominators.tokens}
                passed = []

    def trained(self) -> None:
        """The mini-batch that was given last is in the weights."""
        self._trained += 1
        if self._ends_step:
            self._before_commit(self.client.next_step)
            self.client.commit(self.client.next_step)
            self._trained = 0

    def state_dict(self) -> dict[str, Any]:
        """The client's state, and how many mini-batches of the step at its frontier are trained."""
        return {"client": self.client.state_dict(), "trained": self._trained}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after what was trained when `state` was taken.

        Raises:
            StateMismatch: the state belongs to other rows or another order.
        """
        self.client.load_state_dict(state["client"])
        self._trained = int(state["trained"])


class CommittingLoader(Protocol):
    """A loader that is told what is in the weights."""

    @property
    def client(self) -> RankClient | Loader: ...

    @property
    def optimizer_steps(self) -> int: ...

    def trained(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Frontier(TrainerCallback, ExportableState):  # type: ignore[misc]  # transformers is not followed
    """Commits what is trained; its state travels in `trainer_state.json`."""

    def __init__(self, loader: CommittingLoader) -> None:
        self.loader = loader

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps."""
        return {"args": {}, "attributes": self.loader.state_dict()}

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Go to the frontier of the checkpoint, or to step 0.

        Raises:
            ConfigError: the checkpoint was not saved by `FromServer`.
        """
        if not state.global_step:
            self.loader.client.rewind(0)
            return
        kept = state.stateful_callbacks.get(type(self).__name__)
        if kept is None:
            what = "the checkpoint was saved without the data's frontier"
            raise ConfigError("resume_from_checkpoint", what, "resume from one that FromServer saved")
        self.loader.load_state_dict(kept["attributes"])

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Commit, before the Trainer saves."""
        self.loader.trained()
        state.epoch = state.global_step / self.loader.optimizer_steps * args.num_train_epochs


def _row_sums(logits: torch.Tensor, labels: torch.Tensor, row_tokens: torch.Tensor) -> torch.Tensor:
    """The loss of each row over its targets, from what the model says of the token before; targets stand row by row."""
    import torch

    wanted = labels[:, 1:] != IGNORED
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1][wanted].float(), labels[:, 1:][wanted], reduction="none"
    )
    ends = row_tokens.long().cumsum(0)
    total = torch.cat([losses.new_zeros(1, dtype=torch.float64), losses.double().cumsum(0)])
    return total[ends] - total[ends - row_tokens.long()]


def refuse_decided(args: Any, options: Mapping[str, tuple[Any, str, str]]) -> None:
    """Refuse what would be ignored.

    Raises:
        ConfigError: an option is set that others decide.
    """
    for name, (unset, why, remedy) in options.items():
        value = getattr(args, name, unset)
        if value != unset:
            raise ConfigError(name, f"is {value!r}, and {why}", remedy)


def declared(micro: MicroBatch, columns: Sequence[str]) -> Inputs:
    """Columns of a micro-batch, by name.

    Raises:
        ConfigError: the shard has no such column.
    """
    for name in columns:
        if name not in micro.tensors:
            what = f"names {name!r}, which the shards do not have"
            raise ConfigError("columns", what, f"use some of: {', '.join(sorted(micro.tensors))}")
    return {name: micro.tensors[name] for name in columns}
