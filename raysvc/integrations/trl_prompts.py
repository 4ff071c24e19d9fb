"""TRL's `GRPOTrainer` on a batch server of prompts: rows, order and resume are the server's. Extra: `raysvc[trl]`.

    class Grpo(PromptsFromServer, GRPOTrainer):
        client = raysvc.attach_rank("prompts", dp_size=world_size, rank=rank)

A generation batch is what TRL generates at once: `generation_batch_size` completions, `num_generations` of each of its prompts.
It is trained in `steps_per_generation * num_iterations` forwards of a rank, `gradient_accumulation_steps` of them an
optimizer step.

1. A step of the plan is a generation batch: its prompts over all ranks, in the order of the plan.
2. Each prompt stands there `num_generations` times in a row, as TRL's `RepeatSampler` gives it; a rank takes its part
   of that list, as accelerate deals it. So a prompt's completions may lie on two ranks, as in TRL.
3. A step is committed when its last forward is in the weights.
4. A checkpoint in the middle of a generation batch keeps its completions, rank by rank.

Always true:
- TRL tokenizes no prompt: ids are those of the entry;
- prompts and their order depend neither on ranks nor on `per_device_train_batch_size`, as long as the generation batch is as large;
- a resumed run trains the prompts and completions of one that was not stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raysvc.errors import ConfigError, StateMismatch
from raysvc.integrations.transformers import DECIDED, Frontier, refuse_decided
from raysvc.job.carried import RESERVED

if TYPE_CHECKING:
    from trl import GRPOTrainer as _Host

    from raysvc.client.rank_client import RankClient
    from raysvc.client.steps import RankStep
else:
    _Host = object

IDS, ROW_ID = "prompt_ids", "row_id"
Row = dict[str, Any]


class PromptsFromServer(_Host):  # type: ignore[misc]  # a trainer comes after it
    """Put it before `GRPOTrainer`, and set `client`, of rows of `prompt`; a `train_dataset` is not needed.

    `plan.batch_size` is `generation_batch_size / num_generations`, and `plan.tail` is `drop`, as TRL drops the last
    prompts that fill no generation batch. `num_train_epochs` stays 1: the plan counts epochs.

    Reward functions get the columns that rows carry by name, as TRL gives them those of a data set.

    Attributes:
        client: of this rank.
    """

    client: RankClient

    def __init__(self, *args: Any, **others: Any) -> None:
        from datasets import Dataset

        for name in ("tools", "environment_factory", "rollout_func"):
            if others.get(name) is not None:
                raise ConfigError(
                    name, "renders prompts itself, and theirs are rendered already", "leave it out"
                )
        others.setdefault("train_dataset", Dataset.from_dict({"prompt": [""]}))  # TRL asks for one
        self._prompt_ids: list[list[int]] | None = (
            None  # of the batch that is generated for, where they are ours
        )
        super().__init__(*args, **others)

    def prompt_of(self, ids: list[int], columns: Row) -> Any:
        """Returns what a reward function gets as the prompt: the text of its ids, and so completions are texts too.

        Return messages, made of `columns`, where the reward functions expect completions as messages.
        """
        return self.processing_class.decode(ids)

    def get_train_dataloader(self) -> GenerationBatches:
        """The generation batches of this rank, from the frontier on."""
        self._refuse()
        self.args.ignore_data_skip = True  # the server goes on at the frontier, nothing has to be skipped
        forwards = self.args.steps_per_generation * self.num_iterations
        loader = GenerationBatches(
            self.client, self._rows_of, self._begin, forwards, self.args.gradient_accumulation_steps
        )
        self.remove_callback(Frontier)  # of an earlier train()
        self.add_callback(Frontier(loader))
        self._buffered_inputs = None
        return loader

    def _rows_of(self, step: RankStep) -> list[Row]:
        """This rank's part of a generation batch."""
        from accelerate.utils import gather_object

        found = gather_object(prompts_of(step))
        known = {row[ROW_ID]: row for row in found}
        order = [number for info in step.infos for number in info.row_ids.tolist()]  # 1
        wanted = self.args.generation_batch_size // self.num_generations
        if len(order) != wanted:
            what = f"step {step.index} has {len(order)} prompts, and a generation batch has {wanted}"
            raise ConfigError("plan", what, "leave out skip_rows, and use oversize: error")
        repeated = [number for number in order for _ in range(self.num_generations)]  # 2
        size = len(repeated) // self.accelerator.num_processes
        first = self.accelerator.process_index * size
        return [self._row(known[number]) for number in repeated[first : first + size]]

    def _row(self, found: Row) -> Row:
        columns = {name: found[name] for name in found if name not in (ROW_ID, IDS)}
        return {**columns, "prompt": self.prompt_of(found[IDS], columns), IDS: found[IDS]}

    def _generate_and_score_completions(self, inputs: list[Row]) -> Row:
        self._prompt_ids = (
            [row[IDS] for row in inputs] if IDS in inputs[0] else None
        )  # an eval has TRL's own rows
        rows = [{name: row[name] for name in row if name != IDS} for row in inputs]
        scored: Row = super()._generate_and_score_completions(rows)
        return scored

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        if self._prompt_ids is None:
            return super()._tokenize_prompts(prompts)
        return self._prompt_ids, None, {}

    def _begin(self, done: int) -> None:
        """Go on after `done` forwards of a generation batch.

        Raises:
            StateMismatch: its completions are not there, or are of other ranks.
        """
        self._step = done
        if not done:
            self._buffered_inputs = None
        elif self._buffered_inputs is None:
            what = "was saved in the middle of a generation batch, and this rank's completions are not in it"
            raise StateMismatch(
                "resume_from_checkpoint",
                what,
                "resume with the ranks and batch sizes of the run that saved it",
            )

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        done = self._step % (self.args.steps_per_generation * self.num_iterations)
        if done:  # 4
            import torch

            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            torch.save({"cut": self._cut(), "inputs": self._buffered_inputs}, self._completions_file(folder))
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and (path := self._completions_file(Path(checkpoint))).exists():
            import torch

            kept = torch.load(path, weights_only=True, map_location=self.args.device)
            if kept["cut"] == self._cut():
                self._buffered_inputs = kept["inputs"]

    def _completions_file(self, folder: Path) -> Path:
        return folder / f"completions_{self.args.process_index}.pt"

    def _cut(self) -> list[int]:
        """Returns what decides which completions of a generation batch are this rank's."""
        args = self.args
        return [
            args.world_size,
            args.per_device_train_batch_size,
            args.steps_per_generation,
            self.num_generations,
        ]

    def _refuse(self) -> None:
        args, schedule = self.args, self.client.schedule
        refuse_decided(args, DECIDED)
        prompts = args.generation_batch_size // self.num_generations
        if schedule.batch_size != prompts:
            what = f"is {schedule.batch_size}, and TRL generates for {prompts} prompts at once"
            raise ConfigError(
                "plan.batch_size", what, f"use {prompts}, generation_batch_size / num_generations"
            )
        if schedule.groups_at(schedule.steps_per_epoch - 1) != prompts:
            what = f"is {schedule.tail}, which leaves {schedule.groups_at(schedule.steps_per_epoch - 1)} prompts to the last generation batch"
            raise ConfigError("plan.tail", what, "use drop, as TRL does")
        if schedule.update_epochs != 1:
            raise ConfigError(
                "plan.update_epochs", f"is {schedule.update_epochs}", "use 1, and num_iterations"
            )
        if args.max_steps < 0 and args.num_train_epochs != 1:
            what = f"is {args.num_train_epochs:g}, and the plan counts epochs"
            raise ConfigError("num_train_epochs", what, "use 1, and plan.epochs")
        if not args.shuffle_dataset:
            raise ConfigError(
                "shuffle_dataset", "is false, and the plan orders prompts", "use plan.shuffle: none"
            )


class GenerationBatches:
    """A loader of generation batches: a rank's list of rows, once for each forward that a generation batch is trained in.

    `len` counts the forwards of a rank in the whole run, as the Trainer's schedules want it.

    Args:
        rows_of: this rank's rows of a step.
        begin: told before the first forward how many of its generation batch are trained.
        forwards: of a generation batch.
        accumulated: forwards of an optimizer step.
    """

    def __init__(
        self,
        client: RankClient,
        rows_of: Callable[[RankStep], list[Row]],
        begin: Callable[[int], None],
        forwards: int,
        accumulated: int,
    ) -> None:
        self.client, self._rows_of, self._begin = client, rows_of, begin
        self._forwards, self._accumulated = forwards, accumulated
        self._trained = 0  # forwards of the generation batch at the frontier that are in the weights

    def __len__(self) -> int:
        return self.client.schedule.num_steps * self._forwards

    @property
    def optimizer_steps(self) -> int:
        """The optimizer steps of the whole run."""
        return -(-len(self) // self._accumulated)

    def __iter__(self) -> Iterator[list[Row]]:
        passed = self._trained
        self._begin(passed)
        for step in self.client.steps():
            rows = self._rows_of(step)
            for _ in range(passed, self._forwards):
                yield [dict(row) for row in rows]
            passed = 0

    def trained(self) -> None:
        """The forwards of an optimizer step are in the weights; the run's last step may have fewer."""
        before = self.client.next_step * self._forwards + self._trained
        done, self._trained = divmod(min(before + self._accumulated, len(self)), self._forwards)
        if done > self.client.next_step:
            self.client.commit(done - 1)  # 3

    def state_dict(self) -> dict[str, Any]:
        """The client's state, and how many forwards of the generation batch at its frontier are trained."""
        return {"client": self.client.state_dict(), "trained": self._trained, "forwards": self._forwards}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after what was trained when `state` was taken.

        Raises:
            StateMismatch: the state belongs to other rows or another order, or to a generation batch of other forwards.
        """
        if state["trained"] and state["forwards"] != self._forwards:
            what = f"was taken in the middle of a generation batch of {state['forwards']} forwards, and one has {self._forwards} now"
            raise StateMismatch(
                "state", what, "resume with the steps_per_generation and num_iterations it was taken with"
            )
        self.client.load_state_dict(state["client"])
        self._trained = int(state["trained"])


def prompts_of(step: RankStep) -> list[Row]:
    """`row_id`, `prompt_ids` and the carried columns of the prompts of a rank's shards; dummies are left out.

    Raises:
        ConfigError: a row has targets, or is not padded.
    """
    rows: list[Row] = []
    for shard in step.shards:
        if shard.denominators.tokens:
            what = "has rows with targets, and a prompt has none"
            raise ConfigError("PromptsFromServer", what, "use source.format: prompt")
        if not shard.layout.startswith("padded"):
            raise ConfigError(
                "plan.layout", f"is {shard.layout}, and prompts come one a line", "use padded_left"
            )
        masks = shard.arrays["attention_mask"].astype(np.bool_)
        carried = [
            name
            for name, array in shard.arrays.items()
            if name not in RESERVED and (array.ndim == 1 or name in shard.row_vectors)
        ]
        for line in np.flatnonzero(shard.row_ids >= 0).tolist():
            ids = shard.arrays["input_ids"][line][masks[line]].tolist()
            own = {name: shard.arrays[name][line].tolist() for name in carried}
            rows.append({**own, ROW_ID: int(shard.row_ids[line]), IDS: ids})
    return rows
