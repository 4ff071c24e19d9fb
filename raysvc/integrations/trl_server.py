"""TRL's own trainers on a batch server: rows, order and resume are the server's. Extra: `raysvc[trl]`.

    class Dpo(PairsFromServer, DPOTrainer):
        client = raysvc.attach_rank("pairs", dp_size=world_size, rank=rank)

Axes: P pairs of a micro-batch, L its width.
Always true:
- what `raysvc.integrations.transformers` says;
- TRL tokenizes nothing: ids and masks are those of the entry;
- a pair is in one batch, its chosen row in the first half and its rejected one in the second, as TRL's collators lay them;
- every pair of a mini-batch weighs the same, however they are split over micro-batches and ranks; dummies weigh nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raysvc.collate.columns import IGNORED
from raysvc.errors import ConfigError
from raysvc.integrations.transformers import FromServer, Inputs, declared, refuse_decided

if TYPE_CHECKING:
    import torch

    from raysvc.client.rank_client import MicroBatch

SHARE = "pair_share"
_ROWS = "rows are laid out by the plan"
_MASKS = "masks are those of the entry"
DECIDED_SFT = {  # of `SFTConfig`
    "packing": (False, _ROWS, "use plan.layout: packed"),
    "padding_free": (False, _ROWS, "use plan.layout: packed"),
    "assistant_only_loss": (False, _MASKS, "use train_on of the job"),
    "completion_only_loss": (None, _MASKS, "use train_on of the job"),
}


class TrlFromServer(FromServer):
    """Put it before `SFTTrainer`, and set `client`; a `train_dataset` is not needed."""

    def __init__(self, *args: Any, **others: Any) -> None:
        from datasets import Dataset

        # TRL looks at the first row of its data set before it asks for a loader
        others.setdefault("train_dataset", Dataset.from_dict({"input_ids": [[0]], "labels": [[0]]}))
        super().__init__(*args, **others)

    def _refuse(self) -> None:
        refuse_decided(self.args, DECIDED_SFT)
        super()._refuse()

    def _prepare_dataset(self, dataset: Any, *args: Any, **others: Any) -> Any:
        return dataset


class PairsFromServer(TrlFromServer):
    """Put it before `DPOTrainer` or `RewardTrainer`, and set `client`, of rows of `preference`.

    `RewardTrainer` gets the column `margin` where the shards have it. `DPOTrainer` computes the reference's
    log-probabilities, or with `precompute_ref_log_probs=True` takes those of the column `ref_logprobs`.
    """

    def batch_of(self, micro: MicroBatch) -> Inputs:
        """A micro-batch as the trainer's own collator would lay it.

        Raises:
            ConfigError: the rows are no pairs, or not padded on the right; a column is missing.
        """
        import torch

        tensors = micro.tensors
        if micro.layout != "padded_right":
            raise ConfigError("plan.layout", f"is {micro.layout}, TRL pads pairs", "use padded_right")
        if "chosen" not in tensors:
            what = "has rows that are no pairs, or plan.columns leaves out 'chosen'"
            raise ConfigError("PairsFromServer", what, "use source.format: preference")
        lines = _halves(tensors)
        whole = {
            "input_ids": tensors["input_ids"][lines].long(),
            "attention_mask": tensors["attention_mask"][lines].long(),
        }
        pairs = int((tensors["row_ids"] >= 0).sum()) // 2
        share = pairs * self.args.world_size / max(micro.denominators.groups, 1)
        further = {name: values[lines] for name, values in declared(micro, self.columns).items()}
        return whole | further | self._own(tensors, lines) | {SHARE: torch.tensor(share)}

    def compute_loss(
        self, model: Any, inputs: Inputs, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """TRL's mean over the pairs of a micro-batch, as their share of the mean over the mini-batch."""
        inputs = dict(inputs)
        share = inputs.pop(SHARE)
        found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return (found[0] * share, found[1]) if return_outputs else found * share

    def _own(self, tensors: dict[str, torch.Tensor], lines: torch.Tensor) -> Inputs:
        """Returns what only one of the trainers takes."""
        from trl.trainer.reward_trainer import RewardTrainer

        if isinstance(self, RewardTrainer):
            chosen = lines[: len(lines) // 2]
            return {"margin": tensors["margin"][chosen].float()} if "margin" in tensors else {}
        mask = (tensors["labels"] != IGNORED)[lines]
        found = {"completion_mask": mask.long()}
        if self.args.precompute_ref_log_probs:
            if "ref_logprobs" not in tensors:
                what = "needs the column 'ref_logprobs', which the shards do not have"
                raise ConfigError(
                    "precompute_ref_log_probs", what, "leave it out, or use an entry that has it"
                )
            sums = (tensors["ref_logprobs"][lines].float() * mask).sum(1)
            found["ref_chosen_logps"], found["ref_rejected_logps"] = sums.chunk(2)
        return found

    def _precompute_ref_logps(self, dataset: Any, *args: Any, **others: Any) -> Any:
        return dataset

    def _takes_a_mean(self) -> bool:
        return True


def _halves(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """int64 [2P], the lines of the chosen rows and then those of the rejected ones; dummies only where nothing else is."""
    import torch

    there = torch.nonzero(tensors["row_ids"] >= 0).flatten()
    lines = there if len(there) else torch.arange(2)
    return torch.cat([lines[0::2], lines[1::2]])
