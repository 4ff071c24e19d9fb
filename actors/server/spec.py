"""Types that travel between a batch server and its clients.

Axes: N rows of a mini-batch, R ranks, S rows and dummies of one rank.
Always true:
- every type pickles, and holds no tensors and no handle;
- a spec holds all that a server needs to start again after its process died.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

from raysvc.cache.growing.coming import Coming
from raysvc.collate.info import MiniBatchInfo, info_of_plain
from raysvc.job.config import PlanConfig
from raysvc.media.processor_spec import ProcessorSpec

if TYPE_CHECKING:
    from raysvc.cache.entry import Entry
    from raysvc.collate.collate import Collate
    from raysvc.rl.rollout_facts import RolloutFacts

Share = Literal["none", "stream"]
TRAIN = ""  # name of the stream that is trained; others are evals


class Role(NamedTuple):
    """One of several models that train, or only look, at the same rows.

    Attributes:
        dp_size: data-parallel ranks.
        columns: what its shards carry, some of `plan.columns`; None: all of them.
        batches: what its refs open as in place of shards, such as `raysvc.integrations.skyrl.BatchRules`.
        cp: context-parallel ranks of each of them, which get a part each (`plan.cp_split`); None: nothing is cut.
    """

    dp_size: int
    columns: tuple[str, ...] | None = None
    batches: Collate | None = None
    cp: int | None = None

    @property
    def num_shards(self) -> int:
        """Shards of a mini-batch: rank after rank, in it part after part."""
        return self.dp_size * (self.cp or 1)


class Part(NamedTuple):
    """Carries what one rank gets of a step: its shards of all mini-batches.

    Attributes:
        role: number of the role.
        rank: number of the shard, among those of the role.
    """

    role: int
    rank: int


class Commit(NamedTuple):
    """All steps up to `step` are trained, or `step` was skipped; `moves` of this seat before it."""

    step: int
    skipped: bool
    moves: int


class AdmittedStep(NamedTuple):
    """A step that collators may make.

    Attributes:
        step: 0-based.
        decisions: how many were made by then; whoever makes the step knows as many.
    """

    step: int
    decisions: int


def as_role(ranks: Role | int) -> Role:
    """A role; a plain number of ranks gets all columns."""
    return Role(ranks) if isinstance(ranks, int) else ranks


class SourceSpec(BaseModel):
    """One entry of what is served; its address alone says the same of a finished one."""

    model_config = ConfigDict(frozen=True)
    uri: str
    coming: Coming | None = Field(
        default=None,
        description="What is known of an entry that was not finished when the server was started.",
    )

    @model_validator(mode="before")
    @classmethod
    def _address(cls, value: Any) -> Any:
        return {"uri": value} if isinstance(value, str) else value

    def opened(self, storage_options: Mapping[str, Any]) -> Entry:
        """The entry: a finished one where it is finished by now.

        Raises:
            EntryError: it is gone, damaged or another one.
        """
        from raysvc.cache.find import open_finished
        from raysvc.cache.growing.coming_entry import entry_to_come
        from raysvc.cache.store.open import open_store

        if self.coming is None:
            return open_finished(self.uri, storage_options)
        root, _, folder = self.uri.rpartition("/")
        return entry_to_come(self.coming, open_store(root, storage_options), folder)

    def lasting(self) -> SourceSpec:
        """Returns what holds of it when the build has ended."""
        has_end = self.coming is None or self.coming.has_end
        return SourceSpec(uri=self.uri) if has_end else self


class EvalSpec(BaseModel):
    """Rows that are read beside training."""

    model_config = ConfigDict(frozen=True)
    sources: tuple[SourceSpec, ...] = Field(description="Finished entries.")
    rows: tuple[int, ...] | None = Field(default=None, description="Ids of the rows; None: all.")
    batch_size: int
    without: tuple[str, ...] = Field(default=(), description="Columns of the plan that its rows may lack.")


class MixtureSpec(BaseModel):
    """Several entries in one stream; see `raysvc.plan.mixture`."""

    model_config = ConfigDict(frozen=True)
    names: tuple[str, ...] = Field(description="Of the sources, for display.")
    stages: tuple[tuple[int, tuple[int, ...]], ...] = Field(
        description="Position of the stream at which a stage begins, and the rows of each entry in its period."
    )
    shuffles: tuple[str | None, ...] = Field(
        default=(), description="Of each source, where it is not that of the plan."
    )
    by: Literal["rows", "tokens"] = Field(default="rows", description="What weights count.")


OnStale = Literal["pace", "reissue", "drop", "withhold", "train"]


class PromptSpec(BaseModel):
    """The prompts that a rollout server hands out."""

    model_config = ConfigDict(frozen=True)
    sources: tuple[SourceSpec, ...] = Field(description="Entries of prompts.")
    mixture: MixtureSpec | None = None
    plan: PlanConfig = Field(description="Order and epochs; a step of it is one prompt.")
    storage_options: dict[str, Any] = Field(default_factory=dict, repr=False)
    max_prompt_s: float | None = Field(
        default=None, description="How long a producer may have a prompt; None: as long as it lives."
    )
    max_attempts: int = Field(default=3, description="How often a prompt is handed out.")


class RolloutSpec(BaseModel):
    """Steps are made of groups that producers put, instead of the rows of an entry."""

    model_config = ConfigDict(frozen=True)
    max_staleness: int | None = Field(description="Weight versions a trained row may be old; None: any.")
    wait_s: float = Field(default=600.0, description="How long a fetch waits for enough groups.")
    late: tuple[str, ...] = Field(default=(), description="Columns that may arrive after their rows.")
    defaults: dict[str, float] = Field(
        default_factory=dict, description="Column -> value where a put lacks it."
    )
    on_bad_group: Literal["fill", "shrink"] = Field(
        default="fill", description="What a step does about a group that cannot be collated."
    )
    producer_ttl_s: float = Field(
        default=60.0, description="How long reservations hold without a sign of life."
    )
    rows: Literal["keep", "merge"] = Field(
        default="merge", description="Whether turns that continue one another are trained as one row."
    )
    drop_constant: str | None = Field(
        default=None, description="A per-row column: groups that have one value of it are dropped."
    )
    on_stale: OnStale = Field(default="drop", description="What is done about groups that get too old.")
    prompts: PromptSpec | None = Field(
        default=None, description="None: producers bring prompts of their own."
    )
    model_reads: tuple[str, ...] | None = Field(
        default=None, description="Per-token columns that the model reads; None: those of several numbers."
    )


class ServeSpec(BaseModel):
    """Everything a server needs to start, and to start again after its process died."""

    model_config = ConfigDict(frozen=True)
    name: str
    sources: tuple[SourceSpec, ...] = Field(description="What is trained; (): `rollouts`.")
    mixture: MixtureSpec | None = None
    plan: PlanConfig
    pad_token_id: int
    journal: str | None = Field(description="fsspec URL of the leases' folder; None: kept in memory only")
    storage_options: dict[str, Any] = Field(default_factory=dict, repr=False)
    evals: dict[str, EvalSpec] = Field(default_factory=dict)
    processor: ProcessorSpec | None = Field(default=None, description="Of the media of rows.")
    rollouts: RolloutSpec | None = None
    share: Share = "none"
    share_bytes: int = 256 << 20
    lease_ttl_s: float = 30.0
    orphan_ttl_s: float = 900.0
    reap: bool = False
    collate_threads: int = 2
    collators: int = 0
    num_cpus: float = 0.5
    owner: str = Field(default="", description="Who started it; decides nothing of what is served.")
    team: str = Field(default="", description="Whose server it is; decides nothing of what is served.")

    def difference(self, other: ServeSpec) -> str | None:
        """The fields in which two specs differ, each as "field (this -> other)"; None when equal."""
        hidden = {"storage_options"}  # may hold credentials
        theirs = other._flat()
        found = [
            name if name in hidden else f"{name} ({value!r} -> {theirs[name]!r})"
            for name, value in self._flat().items()
            if value != theirs[name]
        ]
        return ", ".join(found) or None

    def _flat(self) -> dict[str, Any]:
        flat = {**self.lasting().model_dump(exclude={"plan", "owner", "team"}), **self.plan.model_dump()}
        if prompts := (flat["rollouts"] or {}).get("prompts"):
            del prompts["storage_options"]  # may hold credentials
        return flat

    def lasting(self) -> ServeSpec:
        """The spec, with what holds of its sources when their builds have ended."""
        return self.model_copy(update={"sources": tuple(one.lasting() for one in self.sources)})


@dataclass(frozen=True)
class Lease:
    """The right to advance a server.

    Attributes:
        name: of the server.
        fence: number that every call of the holder carries.
        ttl_s: the lease ends when nothing is heard of the holder for this long.
        frontier: next step to train; in rank mode of this rank.
        committed_by: as in `ReaderLease`, when the lease was given.
        plan_hash: identity of the order of rows.
        identity: the fields under that hash.
        entry_key: of the entry that is served, "" for rollouts.
        schedule: JSON of `raysvc.plan.schedule.Schedule`.
        collators: processes of the trainer that make the shards; 0: the server makes them.
        decided: (from step, digest) of the decisions that were made so far, see `raysvc.feedback.decision`.
        cuts: whether context-parallel ranks get parts (`plan.cp_split`).
    """

    name: str
    fence: int
    ttl_s: float
    frontier: int
    plan_hash: str
    identity: dict[str, Any]
    entry_key: str
    schedule: dict[str, Any]
    collators: int = 0
    decided: tuple[tuple[int, str], ...] = ()
    cuts: bool = False
    committed_by: str = ""

    @property
    def forms(self) -> bool:
        """Tells whether steps form as rollouts come, instead of being planned from the start."""
        return not self.entry_key


@dataclass(frozen=True, eq=False)
class StepInfo:
    """Tells the driver about a step: no tensors.

    Attributes:
        index: step, 0-based.
        epoch: 0-based.
        mini_batches: one info per mini-batch, of the first role.
        rows: by mini-batch, role and rank: int32 [S], where each of the rank's rows stands in the mini-batch's `row_ids`,
            -1 for a dummy; () for a rank that fetches its own.
        read_s: reading rows.
        collate_s: writing arrays.
        weight_versions: oldest and newest weight version of the rows (rollouts), else None.
        groups_s: waiting for producers of rollouts.
        build_s: waiting for rows to be tokenized.
        order: as `raysvc.plan.plan.Plan.order_of` of the epoch.
        frontier: of the group when a rank fetched; no part of the step.
        rollouts: of the rows (rollouts), else None; a rank gets their metrics alone.
        rollout_metrics: of a rank.
    """

    index: int
    epoch: int
    mini_batches: tuple[MiniBatchInfo, ...]
    rows: tuple[tuple[tuple[npt.NDArray[np.int32], ...], ...], ...]
    read_s: float
    collate_s: float
    weight_versions: tuple[int, int] | None = None
    groups_s: float = 0.0
    build_s: float = 0.0
    order: str | None = None
    frontier: int = 0
    rollouts: RolloutFacts | None = None
    rollout_metrics: Mapping[str, float] = field(default_factory=dict)

    def for_rank(self, frontier: int) -> list[Any]:
        """Returns what a rank gets, of types that Ray sends without pickling: all but `rows`, which say where the rows of every rank are."""
        minis, versions = [mini.plain for mini in self.mini_batches], self.weight_versions
        times = [self.read_s, self.collate_s, versions and list(versions), self.groups_s, self.build_s]
        metrics = {} if self.rollouts is None else self.rollouts.metrics()
        return [self.index, self.epoch, minis, [], *times, self.order, frontier, metrics]

    @classmethod
    def of_rank(cls, made: list[Any]) -> StepInfo:
        """The info of `for_rank`."""
        index, epoch, minis, _, read_s, collate_s, versions, groups_s, build_s, order, frontier, metrics = (
            made
        )
        infos = tuple(info_of_plain(mini) for mini in minis)
        times = (read_s, collate_s, versions and tuple(versions), groups_s, build_s)
        return cls(index, epoch, infos, (), *times, order, frontier, rollout_metrics=metrics)


@dataclass(frozen=True, eq=False)
class MiniOutline:
    """Tells what the plan alone says of a mini-batch: no row was read.

    Attributes:
        row_ids: int64 [N].
        lengths: int32 [N].
        num_groups: groups.
        rank_tokens: [R], tokens of each rank, dummies included.
        rank_bytes: [R], bytes of each rank's shard.
        num_micro_batches: of each rank.
    """

    row_ids: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int32]
    num_groups: int
    rank_tokens: tuple[int, ...]
    rank_bytes: tuple[int, ...]
    num_micro_batches: int

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return sum(self.rank_bytes)


@dataclass(frozen=True, eq=False)
class StepOutline:
    """A step as `outline` shows it: index, epoch, and one outline per mini-batch."""

    index: int
    epoch: int
    mini_batches: tuple[MiniOutline, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return sum(mini.nbytes for mini in self.mini_batches)
