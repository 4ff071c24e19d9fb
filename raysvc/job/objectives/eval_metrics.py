"""Names what an eval says of each objective, so that `trainer.keep_best` and `trainer.stop_after` may act on it.

Always true:
- these are the names that the losses of `raysvc.actors.worker` give their metrics, which are TRL's, but for those that say
  something of the rows alone;
- each either falls or rises as a model gets better.
"""

from __future__ import annotations

REWARDS = ("rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected")
PAIRS = ("loss", *REWARDS, "logps/chosen", "logps/rejected")
METRICS: dict[str, tuple[str, ...]] = {
    "sft": ("loss", "bits_per_byte"),
    "dpo": PAIRS,
    "ipo": PAIRS,
    "simpo": PAIRS,
    "orpo": (*PAIRS, "log_odds_chosen", "log_odds_ratio"),
    "kto": (*PAIRS, "kl"),
    "reward": ("loss", "accuracy", "margin", "mean_reward", "min_reward", "max_reward", *REWARDS[2:]),
    "process": ("loss", "accuracy"),
    "distill": ("loss",),
}
FALLING = ("loss", "bits_per_byte", "kl", "rewards/rejected", "logps/rejected")
SHOWN = ("loss", "bits_per_byte", "rewards/accuracies", "accuracy")  # where there is room for few


def falls(metric: str) -> bool:
    """Returns whether the lowest value of a metric is the best; else the highest is."""
    return metric in FALLING
