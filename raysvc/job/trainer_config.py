"""The built-in trainer and what it evaluates: sections `trainer` and `evals`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from raysvc.job.section import PositiveInt, Section
from raysvc.job.text_config import SourceConfig

Reduction = Literal["token_mean", "sequence_mean", "trajectory_mean", "group_mean", "prompt_mean", "constant"]
Objective = Literal["sft", "dpo", "ipo", "simpo", "orpo", "kto", "reward", "process", "distill"]


class EvalConfig(Section):
    """Rows that are evaluated during training, each once: of a source of their own, or held out of the job's."""

    source: SourceConfig | None = Field(default=None, description="Same keys as the section source.")
    share: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Share of the job's own groups that is held out by a hash of the prompt, and never trained; see docs/workers.md.",
    )
    rows: PositiveInt | None = Field(
        default=None, description="In place of share: rows of each source of the job."
    )
    batch_size: PositiveInt | None = Field(
        default=None, description="Groups per step; default plan.batch_size."
    )

    @model_validator(mode="after")
    def _one_of_three(self) -> EvalConfig:
        if [self.source, self.share, self.rows].count(None) != 2:
            raise ValueError(
                "has no rows, or rows of several kinds: give one of source, share and rows (the last two hold out rows of the job's own)"
            )
        return self

    @property
    def held(self) -> tuple[Literal["share", "rows"], float] | None:
        """The key that says how much of the job's own rows is held out, and its value; None: the eval has a source."""
        if self.rows is not None:
            return "rows", self.rows
        return None if self.share is None else ("share", self.share)


class KeepBest(Section):
    """The best model is the one with the best value of a metric of an eval."""

    eval: str = Field(description="Its name.")
    metric: str = Field(
        default="loss",
        description="Of the eval: what its objective logs, such as `rewards/accuracies`, or `bits_per_byte` (sft).",
    )


class StopAfter(KeepBest):
    """Stops a run where HF's EarlyStoppingCallback would."""

    patience: PositiveInt = Field(description="Evals without progress, after which the run stops.")
    threshold: float = Field(
        default=0.0, ge=0, description="Progress is better than the best by more than this."
    )


class StagingConfig(Section):
    """How a worker copies shards to its device. Each part can be switched off; no byte changes."""

    prefetch: bool = Field(default=True, description="Copy when a shard arrives; false: when it is trained.")
    copy_stream: bool = Field(default=True, description="false: copies to a GPU wait in the compute stream.")
    pin_memory: bool = Field(default=True, description="false: plain host memory.")
    ring_mb: float | None = Field(
        default=None, gt=0, description="MB for staged shards; None: three times the largest shard."
    )
    timing_every_steps: PositiveInt = Field(
        default=1, description="With trainer.timing: only every Nth step is measured, the others overlap."
    )


class TrainerConfig(Section):
    """The built-in trainer of `raysvc train`."""

    dp_size: PositiveInt = Field(default=1, description="Data-parallel ranks, one worker each.")
    model: str = Field(
        default="tiny",
        description="`tiny` (random, for trying), `tiny-vision` for rows with images or videos, a folder, or a hub name.",
    )
    learning_rate: float = Field(
        default=1e-4, gt=0, description="Peak learning rate of AdamW, after the warm-up."
    )
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant",
        description="Learning rate from the warm-up to the run's last optimizer step; linear and cosine fall to zero.",
    )
    warmup_steps: int = Field(
        default=0, ge=0, description="Optimizer steps over which the learning rate rises to its full value."
    )
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        description="Weight decay of AdamW; biases and norms have none, as in HF's Trainer.",
    )
    max_grad_norm: float | None = Field(default=1.0, gt=0, description="None: gradients are not clipped.")
    objective: Objective = Field(
        default="sft",
        description="What is trained: tokens (sft), pairs (dpo, ipo, simpo, orpo, reward), labels of rows (kto) or of steps (process), or a teacher's entries (distill).",
    )
    beta: float = Field(default=0.1, gt=0, description="Beta of the objectives for pairs and labels.")
    margin: float = Field(
        default=0.0,
        ge=0,
        description="objective=simpo: target margin between the chosen and the rejected row.",
    )
    temperature: float = Field(
        default=1.0, gt=0, description="objective=distill: temperature of teacher and model."
    )
    loss: Reduction = Field(
        default="token_mean",
        description="Which mean of the token losses, over the whole mini-batch; see docs/howto/train.md.",
    )
    loss_constant: float | None = Field(
        default=None, gt=0, description="loss=constant: tokens that every row is divided by (Dr. GRPO)."
    )
    strategy: Literal["ddp", "fsdp"] = Field(
        default="ddp", description="Weights on several ranks: ddp copies them, fsdp shards them (FSDP2)."
    )
    precision: Literal["fp32", "bf16"] = Field(
        default="fp32", description="bf16: float32 weights, bfloat16 forward and backward."
    )
    gradient_checkpointing: bool = Field(
        default=False,
        description="Compute the activations of each layer again in the backward pass: less memory for a third more work.",
    )
    timing: bool = Field(
        default=False, description="Measure each part of an optimizer step; nothing overlaps meanwhile."
    )
    staging: StagingConfig = Field(default=StagingConfig(), description="How shards reach the device.")
    seed: int = Field(default=0, ge=0, description="Seed of the initial weights.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: CUDA if the cluster has a GPU for every rank."
    )
    cpus_per_worker: float = Field(default=0.5, ge=0, description="CPUs that Ray reserves for a worker.")
    gpus_per_worker: float | None = Field(
        default=None,
        ge=0,
        description="GPUs that Ray reserves for a worker; may be a fraction, like 0.5. None: 1 on CUDA, else 0.",
    )
    wait_for_nodes: bool = Field(
        default=False,
        description="true: wait for nodes that come on demand, instead of refusing what the cluster cannot hold now.",
    )
    max_steps: PositiveInt | None = Field(default=None, description="Stop after this many steps.")
    run_dir: str | None = Field(
        default=None,
        description="Folder of checkpoints, row log and summary. Default: runs/<server.name>-<hash of what decides rows and weights>.",
    )
    checkpoint_every_steps: PositiveInt | None = Field(default=50, description="None: only at the end.")
    keep_checkpoints: PositiveInt = Field(
        default=2, description="Number of newest complete checkpoints to keep."
    )
    eval_every_steps: PositiveInt | None = Field(
        default=None, description="Steps between evals; None: only at the end."
    )
    keep_best: KeepBest | None = Field(
        default=None,
        description="Keep and export the best model; see docs/workers.md.",
    )
    stop_after: StopAfter | None = Field(default=None, description="Stop early; see docs/workers.md.")
    report_to: tuple[Literal["wandb", "tensorboard", "mlflow", "trackio"], ...] = Field(
        default=(), description="Trackers to report to; each needs `pip install 'raysvc[NAME]'`."
    )
    resume: bool | Literal["changed"] = Field(
        default=True,
        description="Resume from the newest checkpoint in run_dir; `changed`: also with another learning rate, schedule or length.",
    )

    @field_validator("report_to", mode="before")
    @classmethod
    def _one_tracker(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _constant_where_it_counts(self) -> TrainerConfig:
        if (self.loss == "constant") != (self.loss_constant is not None):
            raise ValueError(
                "loss: constant and loss_constant (tokens) belong together; give both or neither"
            )
        return self
