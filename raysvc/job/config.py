"""One `job.yaml`: the whole of its sections, and what no section can say alone.

Each section has its own file beside this one; whoever uses one imports it from here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator, model_validator

from raysvc.job.build_config import CacheConfig, PoolConfig
from raysvc.job.enrich_config import EnrichConfig
from raysvc.job.mixture_config import AdaptConfig, MixtureConfig, MixtureSourceConfig
from raysvc.job.objectives.eval_metrics import METRICS
from raysvc.job.plan_config import Layout, Oversize, Packing, PlanConfig, RowsConfig, Tail
from raysvc.job.section import PositiveInt, Section
from raysvc.job.server_config import NAME, ServerConfig
from raysvc.job.text_config import (
    PAIRED,
    Format,
    MediaKind,
    SourceConfig,
    TextSpec,
    TokenizerConfig,
    TrainEnd,
    TrainOn,
    Truncation,
)
from raysvc.job.trainer_config import (
    EvalConfig,
    KeepBest,
    Objective,
    Reduction,
    StagingConfig,
    StopAfter,
    TrainerConfig,
)

__all__ = [
    "NAME",
    "PAIRED",
    "AdaptConfig",
    "CacheConfig",
    "EvalConfig",
    "Format",
    "JobConfig",
    "KeepBest",
    "Layout",
    "MediaKind",
    "MixtureConfig",
    "MixtureSourceConfig",
    "Objective",
    "Oversize",
    "Packing",
    "PlanConfig",
    "PoolConfig",
    "Reduction",
    "RowsConfig",
    "ServerConfig",
    "SourceConfig",
    "StagingConfig",
    "StopAfter",
    "Tail",
    "TextSpec",
    "TokenizerConfig",
    "TrainEnd",
    "TrainOn",
    "TrainerConfig",
    "Truncation",
]


class JobConfig(Section):
    """A whole job. `TextSpec`, the part that decides what tokens come out, is `job.text`."""

    source: SourceConfig
    mixture: MixtureConfig | None = Field(
        default=None, description="Several sources instead of the section source."
    )
    tokenizer: TokenizerConfig
    train_on: TrainOn = Field(default="all_assistant_messages", description="Which tokens have loss.")
    train_end: TrainEnd = Field(
        default="template",
        description="What ends a row whose last trained turn has no end in the template: nothing, or `append` the model's end of sequence.",
    )
    max_length: PositiveInt | None = Field(
        default=None, description="Most tokens of a row; None: 1,048,576, and a longer row is quarantined."
    )
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
        if self.train_end == "append" and self.train_on == "all_tokens":
            raise ValueError("train_end: append ends trained turns, and train_on: all_tokens has none")
        plan, windowed = self.plan, self._windowed
        if plan.layout == "packed" and windowed and not plan.micro_batch_tokens and not self.max_length:
            raise ValueError(
                f"plan.layout: packed with shuffle: {windowed} has to know its capacity before the rows; give max_length, or plan.micro_batch_tokens"
            )
        self._refuse_followed()
        if windowed and any(one.ray is not None for one in self._sources):
            raise ValueError(
                f"plan.shuffle: {windowed} goes by slices that are known before they are read, and a Ray Dataset has none; use full or block(n)"
            )
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
        self._refuse_evals_that_decide_nothing()
        return self

    def _refuse_evals_that_decide_nothing(self) -> None:
        """Evals decide only where they are there and run more than once."""
        for key in ("keep_best", "stop_after"):
            named: KeepBest | None = getattr(self.trainer, key)
            if named is None:
                continue
            if named.eval not in self.evals:
                give = f"one of {', '.join(self.evals)}" if self.evals else "a section evals first"
                raise ValueError(f"trainer.{key}.eval: {named.eval} is no eval of this job; give {give}")
            if self.trainer.eval_every_steps is None:
                raise ValueError(
                    f"trainer.{key} needs evals during the run, and they run only at its end; give trainer.eval_every_steps"
                )
            objective, there = self.trainer.objective, METRICS[self.trainer.objective]
            if named.metric not in there:
                raise ValueError(
                    f"trainer.{key}.metric: an eval of objective {objective} has no {named.metric}; give one of {', '.join(there)}"
                )

    def _refuse_followed(self) -> None:
        """Refuse what a source without an end cannot have."""
        held = [(name, f"evals.{name}.{each.held[0]}") for name, each in self.evals.items() if each.held]
        if len(held) > 1:
            raise ValueError(
                f"{held[1][1]}: evals.{held[0][0]} holds out rows already; give one eval rows of the job's own"
            )
        if held and any(each.follow for each in self._sources):
            raise ValueError(
                f"{held[0][1]}: is of all rows of the sources, and one that is followed has no end; give the eval a source"
            )
        evals = {name: each.source for name, each in self.evals.items() if each.source is not None}
        if followed := [name for name, each in evals.items() if each.follow]:
            raise ValueError(
                f"evals.{followed[0]}.source.follow: an eval reads all rows of its source, and this one has no end"
            )
        where, shuffle, epochs = "source", self.plan.shuffle, self.plan.epochs
        if self.mixture is not None:
            mixed = self.mixture.sources.items()
            first = next(((name, each) for name, each in mixed if each.source.follow), None)
            if first is None:
                return
            where, shuffle = f"mixture.sources.{first[0]}.source", first[1].shuffle or shuffle
            epochs = epochs if self.is_endless else 1  # the other sources have some
            if first[1].epochs is not None:
                raise ValueError(f"{where}.follow has no number of rows; give the sources weights")
        elif not self.source.follow:
            return
        problem = (
            f"needs plan.shuffle: window, and it is {shuffle}" if not shuffle.startswith("window")
            else f"has no second epoch, and plan.epochs is {epochs}" if epochs > 1
            else "keeps its rows in the cache, and cache.enabled is false" if not self.cache.enabled
            else "keeps the listing of an earlier run, and cache.force is true" if self.cache.force
            else ""
        )  # fmt: skip
        if problem:
            raise ValueError(f"{where}.follow {problem}")

    @property
    def is_endless(self) -> bool:
        """Returns whether all rows that a run begins with are of sources that are followed."""
        if self.mixture is None:
            return self.source.follow
        first = [each for each in self.mixture.sources.values() if not each.from_step and each.weight != 0]
        return all(each.source.follow for each in first)

    @property
    def _sources(self) -> list[SourceConfig]:
        return [each.source for each in self.mixture.sources.values()] if self.mixture else [self.source]

    @property
    def _windowed(self) -> str | None:
        """The first shuffle of a source that goes by slices."""
        sources = self.mixture.sources.values() if self.mixture else ()
        found = [each.shuffle or self.plan.shuffle for each in sources] or [self.plan.shuffle]
        return next((shuffle for shuffle in found if shuffle.startswith("window")), None)

    @property
    def text(self) -> TextSpec:
        """Returns what decides the tokens of a row."""
        return TextSpec(
            format=self.source.format,
            columns=self.source.columns,
            roles=self.source.roles,
            ignore=self.source.ignore,
            drop_nulls=self.source.drop_nulls,
            carry=self.source.carry,
            media_allow=self.source.media_allow,
            tokenizer=self.tokenizer,
            train_on=self.train_on,
            train_end=self.train_end,
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
        optional = ("follow", "stream", "drop_nulls", "ray", "args", "version")
        unset = {name for name in optional if not getattr(self.source, name)}
        not_deciding = {"storage_options", "media", *unset}
        decides: dict[str, Any] = {
            "source": self.source.model_dump(mode="json", exclude=not_deciding),
            "mixture": self.mixture.decides() if self.mixture else None,
            "text": self.text.model_dump(mode="json", exclude={"media", "media_allow", *unset}),
            "plan": self.plan.model_dump(mode="json", include=set(plan)),
            "trainer": self.trainer.model_dump(mode="json", include=set(trainer)),
        }
        if held := [each.held[1] for each in self.evals.values() if each.held]:
            decides["held"] = held[0]  # a share is below 1, and a number of rows is not
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:8]


def held_beside(job: JobConfig) -> list[dict[str, float]]:
    """Returns what a job's server and collators hold, beside its workers."""
    server = [{"CPU": job.server.num_cpus}] if job.server.num_cpus else []
    return server + [{"CPU": 1.0}] * job.server.collators


def idle_ranks(job: JobConfig) -> int:
    """Ranks that have no row in any mini-batch, as far as that is known before the rows."""
    plan = job.plan
    if job.train_on == "each_assistant_turn" or plan.layout == "stream":
        return 0  # a group is several rows, or a row several lines
    return max(0, job.trainer.dp_size - (plan.mini_batch_size or plan.batch_size))


def cpus_held(job: JobConfig) -> float:
    """CPUs that a job's server, collators and workers hold at the same time."""
    beside = sum(each["CPU"] for each in held_beside(job))
    return beside + job.trainer.dp_size * job.trainer.cpus_per_worker
