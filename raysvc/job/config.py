"""One `job.yaml`: source, tokenizer, cache, plan, server and trainer.

Always true:
- a config is frozen, and checked when it is made;
- an unknown key is an error that names the nearest known one;
- `None` means "no limit" or "derive it", never -1.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from datetime import date as Day
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from raysvc.job.carried import RESERVED, CarriedColumn
from raysvc.job.enrich_config import EnrichConfig
from raysvc.job.row_id_file import read_row_ids

MediaKind = Literal["image", "audio", "video"]
Format = Literal[
    "auto",
    "chat",
    "alpaca",
    "question_answer",
    "prompt_completion",
    "text",
    "preference",
    "kto",
    "stepwise",
    "pretokenized",
    "prompt",
]
PAIRED = ("preference", "kto")  # formats whose rows give two sequences that stay together
TrainOn = Literal[
    "last_assistant_message",
    "all_assistant_messages",
    "each_assistant_turn",
    "completion",
    "all_tokens",
    "message_weight",
]
Truncation = Literal["error", "drop", "keep_start", "keep_end_turns"]
Layout = Literal["padded_right", "padded_left", "packed", "stream"]
Tail = Literal["pad", "drop", "wrap"]
Packing = Literal["balanced", "best_fit", "first_fit"]
Oversize = Literal["error", "truncate", "drop", "alone"]
Reduction = Literal["token_mean", "sequence_mean", "group_mean", "prompt_mean", "constant"]
Objective = Literal["sft", "dpo", "ipo", "simpo", "orpo", "kto", "reward", "process", "distill"]
PositiveInt = Annotated[int, Field(ge=1)]
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"


SHUFFLES = re.compile(r"none|full|block\([1-9]\d*\)|window(\([1-9]\d{0,3}\))?")
RowId = Annotated[int, Field(ge=0, lt=1 << 63)]


class Model(BaseModel):
    """Frozen, closed base of every section."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class SourceConfig(Model):
    """Where rows come from: files (`path`) or a `datasets` name or folder (`dataset`)."""

    path: tuple[str, ...] = Field(default=(), description="Files, globs or folders; any fsspec URL.")
    dataset: str | None = Field(default=None, description="A `datasets` hub name or a `save_to_disk` folder.")
    subset: str | None = Field(default=None, description="Configuration name of the dataset.")
    stream: bool = Field(
        default=False,
        description="Read the files of a `datasets` name by their addresses, slice by slice, without a download.",
    )
    follow: bool = Field(
        default=False,
        description="The files grow: what appears later is trained after what was there; see docs/howto/follow.md.",
    )
    revision: str | None = Field(default=None, description="Commit, tag or branch of the dataset.")
    split: str | None = Field(default=None, description='Split with an optional slice, like "train[:10%]".')
    format: Format = Field(
        default="auto", description="What a row holds; `auto` looks at the first row's columns."
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Our name -> your column, e.g. {messages: talk}; role and content: keys of a message.",
    )
    roles: dict[str, str] = Field(
        default_factory=dict, description="Your role -> ours, e.g. {narrator: system}, before the usual ones."
    )
    ignore: tuple[str, ...] = Field(
        default=(),
        description="Columns to ignore although they would be refused, because they have no meaning in this job: [label].",
    )
    carry: dict[str, CarriedColumn] = Field(
        default_factory=dict,
        description="Columns that travel with their row to the worker: [domain, id], or name -> what it holds.",
    )
    media: bool | tuple[MediaKind, ...] | None = Field(
        default=None,
        description="Whether rows may have media, or the kinds that they may have: [image, video]; None: as the first row shows.",
    )
    storage_options: dict[str, Any] = Field(default_factory=dict, repr=False, description="Passed to fsspec.")

    @field_validator("path", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("carry", mode="before")
    @classmethod
    def _bare_names(cls, value: object) -> object:
        if isinstance(value, str):
            raise ValueError(f"give a list, [{value}], or name -> what it holds")
        return {name: {} for name in value} if isinstance(value, list | tuple) else value

    @field_validator("carry")
    @classmethod
    def _free_names(cls, value: dict[str, CarriedColumn]) -> dict[str, CarriedColumn]:
        if taken := sorted(RESERVED & value.keys()):
            raise ValueError(f"{taken[0]!r} is a name that raysvc uses; rename the column in the source")
        return value

    @model_validator(mode="after")
    def _exactly_one(self) -> SourceConfig:
        if bool(self.path) == (self.dataset is not None):
            raise ValueError("give exactly one of `path` and `dataset`")
        if self.stream and self.dataset is None:
            raise ValueError("stream is for a `datasets` name; files of `path` are read by slices anyway")
        if self.follow and self.dataset is not None:
            raise ValueError("follow is for files that appear; name their folder in `path`, not a dataset")
        return self


class TokenizerConfig(Model):
    """Which tokenizer, and with which template."""

    name: str = Field(description="Folder or hub name.")
    revision: str | None = Field(default=None, description="Commit, tag or branch on the hub.")
    chat_template: str | None = Field(default=None, description="A file, or the template text itself.")
    template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Extra variables for the template."
    )
    date: Day | None = Field(
        default=None,
        description="Date for templates that ask for one (`strftime_now`); required for these.",
    )
    trust_remote_code: bool = Field(
        default=False, description="Run Python code that comes with the tokenizer."
    )


class CacheConfig(Model):
    """Where finished entries live."""

    root: str | None = Field(
        default=None,
        description="Folder or fsspec URL. Default: RAYSVC_CACHE_DIR, else .raysvc/cache.",
    )
    enabled: bool = Field(
        default=True, description="false: build into a private entry that nobody else finds."
    )
    force: bool = Field(default=False, description="Build again even if the entry exists.")
    unsafe_store: bool = Field(default=False, description="Allow a store without create-if-absent.")
    storage_options: dict[str, Any] = Field(default_factory=dict, repr=False, description="Passed to fsspec.")


class PoolConfig(Model):
    """CPU workers that tokenize."""

    min: PositiveInt = Field(default=1, description="Workers to keep while a build runs.")
    max: PositiveInt | None = Field(default=None, description="None: as many as there are slices.")
    slice_mb: float | None = Field(
        default=None, gt=0, description="Source MB per slice; None: a 64th of the source, between 4 and 32."
    )
    label_selector: dict[str, str] = Field(
        default={"raysvc-pool": "!gpu"},
        description="Labels of the nodes that may tokenize; by default all nodes but those labelled as the GPU pool.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> PoolConfig:
        if self.max is not None and self.max < self.min:
            raise ValueError(f"max ({self.max}) is below min ({self.min})")
        return self


class PlanConfig(Model):
    """Which rows go where, and in which shape."""

    batch_size: PositiveInt = Field(
        default=32, description="Groups per step: rows, or conversations with train_on: each_assistant_turn."
    )
    mini_batch_size: PositiveInt | None = Field(
        default=None, description="Groups per optimizer step; default batch_size."
    )
    epochs: PositiveInt = Field(default=1, description="Passes over all groups, each in its own order.")
    update_epochs: PositiveInt = Field(
        default=1, description="Passes over the mini-batches of one step (RL)."
    )
    seed: int = Field(default=0, ge=0, description="Seed of the shuffle.")
    shuffle: str = Field(
        default="full",
        description="none, full, block(n): shuffle blocks of n rows, or window: shuffle slices, and rows among the W slices of a moving window; window(W) says how many.",
    )
    order: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
        description="module:name of a function of (epoch, rows) that orders the groups in place of `shuffle`; see docs/concepts.md.",
    )
    tail: Tail = Field(
        default="pad",
        description="What to do with the groups of a last step that is not full: pad makes a short step, drop leaves them out, wrap fills it from the start of the epoch.",
    )
    layout: Layout = Field(default="padded_right", description="Layout of the arrays; see docs/concepts.md.")
    micro_batch_size: PositiveInt | None = Field(
        default=None, description="Rows per forward on one rank; default 8 unless micro_batch_tokens is set."
    )
    micro_batch_tokens: PositiveInt | None = Field(
        default=None,
        description="Token budget of one forward on one rank. For `packed`: the capacity of a line; default: the longest row, and at least 4096.",
    )
    packing: Packing = Field(
        default="balanced",
        description="How rows are packed into lines: balanced evens out ranks, best_fit needs the fewest lines, first_fit is first-fit-decreasing.",
    )
    oversize: Oversize = Field(default="error", description="What to do with a row over the token budget.")
    cost: tuple[PositiveInt, PositiveInt] | None = Field(
        default=None,
        description="[a, b]: a row of L tokens costs a*L + b*L^2, which evens out ranks; None: derived from trainer.model.",
    )
    pad_to_multiple: PositiveInt = Field(default=1, description="Widths are rounded up to this.")
    align: PositiveInt = Field(default=1, description="Packed: every sequence starts at a multiple of this.")
    window: PositiveInt | None = Field(default=None, description="layout=stream: tokens per window.")
    columns: tuple[str, ...] = Field(
        default=("input_ids", "attention_mask", "position_ids", "labels"),
        description="Arrays to send: any of input_ids, attention_mask, position_ids, loss_mask, labels, and carried columns.",
    )
    pad_values: dict[str, float] = Field(
        default_factory=dict,
        description="Column -> value of cells without a token. Default: what source.carry says, else 0.",
    )
    skip_rows: tuple[RowId, ...] = Field(
        default=(),
        description="Row ids that are never trained: a list, or a file (one id per line, or a JSON list).",
    )

    @field_validator("skip_rows", mode="before")
    @classmethod
    def _ids_of_a_file(cls, value: object) -> object:
        return read_row_ids(value) if isinstance(value, str) else value

    @field_validator("shuffle")
    @classmethod
    def _shuffle_is_known(cls, value: str) -> str:
        return _known_shuffle(value)

    @model_validator(mode="after")
    def _consistent(self) -> PlanConfig:
        if self.micro_batch_size is not None and self.micro_batch_tokens is not None:
            raise ValueError("give micro_batch_size or micro_batch_tokens, not both")
        if self.layout == "packed" and self.micro_batch_size is not None:
            raise ValueError("layout: packed has lines of micro_batch_tokens and no micro_batch_size")
        if self.layout == "stream" and self.order is not None:
            raise ValueError("layout: stream cuts rows into windows, and order is one of groups")
        if self.layout == "stream" and self.window is None:
            raise ValueError("layout: stream needs window, the tokens of one row")
        if self.shuffle.startswith("window") and self.layout == "stream":
            raise ValueError(
                f"layout: stream cuts rows without regard to slices, and shuffle: {self.shuffle} goes by them; use packed, or shuffle: full"
            )
        if self.shuffle.startswith("window") and self.order is not None:
            raise ValueError(
                f"order needs all rows, and shuffle: {self.shuffle} has some; leave one of them out"
            )
        if self.mini_batch_size is not None and self.mini_batch_size > self.batch_size:
            raise ValueError(
                f"mini_batch_size ({self.mini_batch_size}) is above batch_size ({self.batch_size})"
            )
        return self


class ServerConfig(Model):
    """The named actor that plans and collates."""

    name: str = Field(default="default", pattern=NAME, description="Name by which a trainer attaches.")
    look_ahead_steps: int = Field(default=2, ge=0, description="Steps to fetch before they are needed.")
    lease_ttl_s: float = Field(
        default=30.0, gt=0, description="Seconds after which a lease without heartbeats ends."
    )
    collate_threads: PositiveInt = Field(default=2, description="Steps collated at the same time.")
    collators: int = Field(
        default=0,
        ge=0,
        description="Processes of the trainer, one CPU each, that make the shards of a step in place of the server: for rows with media. So many at most: those without work end, and come back.",
    )
    num_cpus: float = Field(default=0.5, ge=0, description="CPUs that Ray reserves for the server.")
    placement: Literal["any", "data", "trainer"] = Field(
        default="any",
        description="Where the server runs: any node with room; data: the node that starts it, if the cache is a folder; trainer: the node of rank 0.",
    )
    orphan_ttl_s: float = Field(
        default=900.0, gt=0, description="Seconds without a lease after which the server frees its data."
    )
    reap: bool = Field(default=False, description="Shut down after orphan_ttl_s without a lease.")
    detached: bool = Field(default=False, description="The server of `raysvc train` outlives the run.")
    share: Literal["none", "stream"] = Field(
        default="none",
        description="stream: several trainers read the same steps; each step is collated once.",
    )
    share_mb: PositiveInt = Field(
        default=256, description="MB of collated steps to keep for other ranks and readers."
    )

    @model_validator(mode="after")
    def _collators_of_one_trainer(self) -> ServerConfig:
        if self.collators and self.share == "stream":
            raise ValueError(
                "collators belong to one trainer, and share: stream makes each step once for all"
            )
        return self


class MixtureSourceConfig(Model):
    """One source of a mixture."""

    source: SourceConfig = Field(description="Same keys as the section source.")
    weight: float | None = Field(
        default=None, ge=0, description="Share of the stream, relative to the other sources."
    )
    epochs: float | None = Field(default=None, gt=0, description="Passes over this source in one epoch.")
    from_step: int = Field(
        default=0, ge=0, description="The source joins at this step; earlier steps do not change."
    )
    shuffle: str | None = Field(default=None, description="As `plan.shuffle`, for this source.")

    @field_validator("shuffle")
    @classmethod
    def _shuffle_is_known(cls, value: str | None) -> str | None:
        return value if value is None else _known_shuffle(value)


class AdaptConfig(Model):
    """Starve the sources of a mixture whose loss stays high; see `raysvc.training.adapting`."""

    every_steps: PositiveInt = Field(
        description="Look at the losses of so many steps at a time; what follows holds as many steps later. At least server.look_ahead_steps + 2."
    )
    starve_above: float = Field(
        gt=1,
        description="A source gets no more rows when its mean loss is above this times the median of the others'.",
    )


class MixtureConfig(Model):
    """Several sources in one stream, by exact counts; each is tokenized into a cache entry of its own."""

    sources: dict[str, MixtureSourceConfig] = Field(
        min_length=1, description="Name -> source, with a weight or with epochs; append new ones at the end."
    )
    by: Literal["rows", "tokens"] = Field(
        default="rows", description="What the weights count; with a window, rows of the source."
    )
    adapt: AdaptConfig | None = Field(
        default=None, description="Starve sources whose loss stays high, while `raysvc train` trains."
    )

    def decides(self) -> dict[str, Any]:
        """The fields as JSON; a shuffle only where a source has its own, and `adapt` where it is given."""
        known = self.model_dump(mode="json")
        if self.adapt is None:
            del known["adapt"]
        for each in known["sources"].values():
            del each["source"]["follow"]  # refused
            if not each["source"]["stream"]:
                del each["source"]["stream"]
            if each["shuffle"] is None:
                del each["shuffle"]
        return known

    @model_validator(mode="after")
    def _weights_or_epochs(self) -> MixtureConfig:
        sources = self.sources.values()
        kinds = {(each.weight is None, each.epochs is None) for each in sources}
        if kinds not in ({(False, True)}, {(True, False)}):
            raise ValueError("give every source a weight, or every source epochs")
        if self.by == "tokens" and kinds == {(True, False)}:
            raise ValueError("by: tokens needs weights")
        if self.adapt is not None and kinds == {(True, False)}:
            raise ValueError("adapt changes weights; give every source a weight")
        if not any(each.from_step == 0 and each.weight != 0 for each in sources):
            raise ValueError("no source begins at step 0")
        return self


class EvalConfig(Model):
    """Rows that are evaluated during training, each once."""

    source: SourceConfig = Field(description="Same keys as the section source.")
    batch_size: PositiveInt | None = Field(
        default=None, description="Groups per step; default plan.batch_size."
    )


class StagingConfig(Model):
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


class TrainerConfig(Model):
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
    weight_decay: float = Field(default=0.0, ge=0, description="Weight decay of AdamW.")
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


class JobConfig(Model):
    """A whole job. `TextSpec`, the part that decides what tokens come out, is `job.text`."""

    source: SourceConfig
    mixture: MixtureConfig | None = Field(
        default=None, description="Several sources instead of the section source."
    )
    tokenizer: TokenizerConfig
    train_on: TrainOn = Field(default="all_assistant_messages", description="Which tokens have loss.")
    max_length: PositiveInt | None = Field(default=None, description="Most tokens of a row; None: no limit.")
    truncation: Truncation = Field(default="drop", description="What to do with a longer row.")
    max_quarantine: float = Field(
        default=0.01, ge=0, le=1, description="Share of rows that may be quarantined before the build fails."
    )
    workers: PoolConfig = PoolConfig()
    cache: CacheConfig = CacheConfig()
    plan: PlanConfig = PlanConfig()
    enrich: EnrichConfig = EnrichConfig()
    server: ServerConfig = ServerConfig()
    trainer: TrainerConfig = TrainerConfig()
    evals: dict[str, EvalConfig] = Field(default_factory=dict, description="Name -> rows of an eval.")

    @model_validator(mode="before")
    @classmethod
    def _first_of_the_mixture(cls, value: Any) -> Any:
        """`source` stands for one source: of a mixture, the first."""
        mixture = value.get("mixture") if isinstance(value, Mapping) else None
        sources = mixture.get("sources") if isinstance(mixture, Mapping) else None
        first = next(iter(sources.values()), None) if isinstance(sources, Mapping) else None
        if not isinstance(first, Mapping) or "source" not in first:
            return value
        if value.get("source", first["source"]) != first["source"]:
            raise ValueError("give source or mixture, not both")
        return {**value, "source": first["source"]}

    @field_validator("tokenizer", mode="before")
    @classmethod
    def _bare_name(cls, value: object) -> object:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _complete(self) -> JobConfig:
        if self.max_length is None and "truncation" in self.model_fields_set and self.truncation != "drop":
            raise ValueError(f"truncation: {self.truncation} needs max_length")
        plan, windowed = self.plan, self._windowed
        if plan.layout == "packed" and windowed and not plan.micro_batch_tokens and not self.max_length:
            raise ValueError(
                f"plan.layout: packed with shuffle: {windowed} has to know its capacity before the rows; give max_length, or plan.micro_batch_tokens"
            )
        self._refuse_followed()
        adapt, ahead = self.mixture.adapt if self.mixture else None, self.server.look_ahead_steps
        if adapt is not None and adapt.every_steps < ahead + 2:
            raise ValueError(
                f"mixture.adapt.every_steps: {adapt.every_steps} is less than server.look_ahead_steps + 2 = {ahead + 2}, and the steps that a decision changes would be handed out before it"
            )
        if adapt is not None and self.server.share != "none":
            raise ValueError("mixture.adapt is for one trainer, and server.share: stream has several")
        if self.trainer.eval_every_steps is not None and not self.evals:
            raise ValueError(
                "trainer.eval_every_steps is given, but there are no evals; add a section evals or leave the key out"
            )
        return self

    def _refuse_followed(self) -> None:
        """Refuse what a source without an end cannot have."""
        others = {f"evals.{name}.source": each.source for name, each in self.evals.items()}
        if self.mixture is not None:
            others |= {
                f"mixture.sources.{name}.source": each.source for name, each in self.mixture.sources.items()
            }
        if followed := [name for name, source in others.items() if source.follow]:
            raise ValueError(f"{followed[0]}.follow: only the section source of a job can be followed")
        if not self.source.follow:
            return
        problem = (
            f"needs plan.shuffle: window, and it is {self.plan.shuffle}" if not self._windowed
            else f"has no second epoch, and plan.epochs is {self.plan.epochs}" if self.plan.epochs > 1
            else "keeps its rows in the cache, and cache.enabled is false" if not self.cache.enabled
            else "keeps the listing of an earlier run, and cache.force is true" if self.cache.force
            else ""
        )  # fmt: skip
        if problem:
            raise ValueError(f"source.follow {problem}")

    @property
    def _windowed(self) -> str | None:
        """The first shuffle of a source that goes by slices."""
        sources = self.mixture.sources.values() if self.mixture else ()
        found = [each.shuffle or self.plan.shuffle for each in sources] or [self.plan.shuffle]
        return next((shuffle for shuffle in found if shuffle.startswith("window")), None)

    @property
    def text(self) -> TextSpec:
        """What decides the tokens of a row."""
        return TextSpec(
            format=self.source.format,
            columns=self.source.columns,
            roles=self.source.roles,
            ignore=self.source.ignore,
            carry=self.source.carry,
            tokenizer=self.tokenizer,
            train_on=self.train_on,
            max_length=self.max_length,
            truncation=self.truncation,
        )

    @property
    def run_dir(self) -> str:
        """Folder of checkpoints, row log and summary."""
        if self.trainer.run_dir is not None:
            return self.trainer.run_dir
        return f"runs/{self.server.name}-{self._run_digest()}"

    def _run_digest(self) -> str:
        """Eight hex digits of what decides rows, order and weights, however long, on however many ranks."""
        plan = ("batch_size", "mini_batch_size", "order", "seed", "shuffle", "tail")
        trainer = ("model", "learning_rate", "lr_schedule", "warmup_steps", "weight_decay", "loss", "seed")
        unset = (name for name in ("follow", "stream") if not getattr(self.source, name))
        not_deciding = {"storage_options", "media", *unset}
        decides = {
            "source": self.source.model_dump(mode="json", exclude=not_deciding),
            "mixture": self.mixture.decides() if self.mixture else None,
            "text": self.text.model_dump(mode="json", exclude={"media"}),
            "plan": self.plan.model_dump(mode="json", include=set(plan)),
            "trainer": self.trainer.model_dump(mode="json", include=set(trainer)),
        }
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:8]


def _known_shuffle(value: str) -> str:
    if not SHUFFLES.fullmatch(value):
        raise ValueError(f"{value!r} is not one of none, full, block(n), window, window(W) with n, W >= 1")
    return value


class TextSpec(Model):
    """What decides the tokens and the mask of a row, and nothing else."""

    format: Format = "auto"
    columns: dict[str, str] = Field(default_factory=dict)
    roles: dict[str, str] = Field(default_factory=dict)
    ignore: tuple[str, ...] = ()
    carry: dict[str, CarriedColumn] = Field(default_factory=dict)
    media: tuple[MediaKind, ...] = ()
    tokenizer: TokenizerConfig
    train_on: TrainOn = "all_assistant_messages"
    max_length: PositiveInt | None = None
    truncation: Truncation = "drop"
