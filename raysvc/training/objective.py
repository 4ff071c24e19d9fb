"""Defines what a job trains: the loss of its objective, if the rows are made for it.

Always true:
- rows of pairs or with labels are never trained as plain rows: a rejected answer or a wrong step is not an example;
- an objective names the column that the rows lack.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raysvc.builds.job_plan import plan_config
from raysvc.errors import ConfigError
from raysvc.job.objectives.units import UNITS
from raysvc.scoring.wanted import FORMAT, NEEDS, check_rows

if TYPE_CHECKING:
    from raysvc.builds.cache_entry import CacheEntry
    from raysvc.job.config import JobConfig, Reduction
    from raysvc.job.trainer_config import TrainerConfig

NO_EXAMPLES = {
    "preference": "half of them are not",
    "kto": "half of them are not",
    "stepwise": "what is to be learned is the labels of their steps",
}
OF_A_CRITIC = ("reward", "process")
REMEDIES = {
    "ref_logprobs": "compute it: raysvc enrich; or carry it: source.carry: {ref_logprobs: ...}",
    "teacher_ids": "name a teacher: enrich: {teacher: {model: ...}}; or carry it: source.carry: {teacher_ids: ...}",
}


def objective_of(job: JobConfig, entry: CacheEntry) -> Any:
    """The loss that the workers train; None: cross-entropy of the targets.

    Raises:
        ConfigError: the rows are of another format, or lack a column.
    """
    from raysvc.actors.worker.losses import DistillLoss, StepLoss
    from raysvc.actors.worker.row_losses import KtoLoss, PairLoss, RewardLoss

    trainer, columns = job.trainer, plan_config(job, entry).columns
    _check(job, entry, columns)
    if trainer.objective == "distill":
        return DistillLoss(trainer.temperature)
    if trainer.objective == "process":
        return StepLoss()
    if trainer.objective == "kto":
        return KtoLoss(trainer.beta)
    if trainer.objective == "reward":
        return RewardLoss(margins="margin" in columns)
    kinds = {"dpo": "sigmoid", "ipo": "ipo", "simpo": "simpo", "orpo": "orpo"}
    if trainer.objective not in kinds:
        return None
    return PairLoss(kinds[trainer.objective], trainer.beta, trainer.margin)  # type: ignore[arg-type]


def mean_of(trainer: TrainerConfig) -> Reduction:
    """Returns which mean the loss of a mini-batch is: that of `trainer.loss`, or the one over pairs and labels."""
    counts_rows = trainer.objective in FORMAT and trainer.objective != "process"
    return "group_mean" if counts_rows else trainer.loss


def unit_of(trainer: TrainerConfig) -> str:
    """Returns what two rows of a job are one of: `pairs`, or `examples` that stand beside a mismatched row; "": nothing."""
    return UNITS.get(FORMAT.get(trainer.objective, ""), "")


def _check(job: JobConfig, entry: CacheEntry, columns: tuple[str, ...]) -> None:
    objective = job.trainer.objective
    where = f"trainer.objective {objective}"
    check_rows(job, entry)
    for recipe in (one.recipe for one in entry.entries):
        found = str(recipe.get("format"))
        if objective not in FORMAT and found in NO_EXAMPLES:
            fits = [name for name, its in FORMAT.items() if its == found]
            what = f"trains every row as an example, and these are {found}: {NO_EXAMPLES[found]}"
            raise ConfigError(where, what, f"use one of {', '.join(fits)}")
    for name in NEEDS.get(objective, ()):
        if name not in columns:
            default = f"carry it: source.carry: {{{name}: ...}}"
            raise ConfigError(where, f"needs a column {name!r}", REMEDIES.get(name, default))
