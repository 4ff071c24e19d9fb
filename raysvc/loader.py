"""The steps of a job in this process: no server, no cluster, and Ray is not imported.

Axes: R ranks.
Always true:
- rank r of R gets the bytes, row ids and order that an attached client with `rank=r, dp_size=R` gets;
- a state goes on in any of the two, with any R;
- look-ahead changes no byte of what comes, and `state_dict` is the committed frontier, never the look-ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysvc.actors.server.entry_stream import EntryStream, streams_of
from raysvc.actors.server.spec import TRAIN, Lease, Part, Role
from raysvc.client.arguments import integer, optional_integer
from raysvc.client.data_state import frontier_of, state_of
from raysvc.client.steps import MicroBatch, RankStep, micros_of
from raysvc.errors import ConfigError, ServerError, StepOutOfOrder
from raysvc.job.job_file import load_job
from raysvc.progress import Progress, silent

OTHER_WORDS = ("world_size", "num_replicas", "num_shards")  # for dp_size, in torch and datasets

if TYPE_CHECKING:
    from typing import Self

    from raysvc.actors.server.spec import StepInfo
    from raysvc.builds.cache_entry import CacheEntry
    from raysvc.builds.places import Place
    from raysvc.client.torch_dataset import RankDataset
    from raysvc.collate.shard import Shard
    from raysvc.job.config import JobConfig
    from raysvc.plan.schedule import Schedule


def load(
    config: str | Path | Mapping[str, Any] | JobConfig | None = None,
    *,
    dp_size: int = 1,
    rank: int = 0,
    address: str | None = None,
    progress: Progress = silent,
    **overrides: Any,
) -> Loader:
    """Tokenize a job's source, or find it in the cache, and give its steps to this process.

    Args:
        config: as in `raysvc.tokenize`.
        dp_size: data-parallel ranks.
        rank: of this process.
        address: Ray cluster that tokenizes what is too large for one process, such as "local"; None: that is refused.
        progress: as in `raysvc.tokenize`.
        overrides: as in `raysvc.tokenize`.

    Raises:
        ConfigError: the job needs a server, or columns that nobody has computed, or its source is large.
        UserMistake: as `raysvc.tokenize`.
    """
    from raysvc.api import serve_spec

    if word := next((one for one in OTHER_WORDS if one in overrides), None):
        remedy = (
            f"write load(dp_size={overrides[word]!r}, rank=...), or loader.steps(rank=..., world_size=...)"
        )
        raise ConfigError(f"load({word})", "is called dp_size", remedy)
    job, rank = load_job(config, **overrides), _known_rank("load", rank, "dp_size", dp_size)
    if job.plan.cp_split is not None:
        what = "is for ranks that attach to a server with a mesh"
        raise ConfigError(
            "plan.cp_split", what, "leave it out, or use raysvc.serve and raysvc.attach_rank(mesh=...)"
        )
    entry = _entry_of(job, address, progress)
    # nothing of a run folder is read or written: decisions are made with a server
    spec = serve_spec(job, entry, evals=()).model_copy(update={"journal": ""})
    return Loader(job, entry, streams_of(spec)[TRAIN], rank, dp_size, job.server.look_ahead_steps)


def _known_rank(caller: str, rank: int, word: str, num_ranks: int) -> int:
    size = integer(f"{caller}({word})", num_ranks, 1)
    if integer(f"{caller}(rank)", rank, 0) >= size:
        raise ConfigError(f"{caller}(rank)", f"{rank} is not below {word} = {size}", f"give 0 to {word} - 1")
    return rank


def _entry_of(job: JobConfig, address: str | None, progress: Progress) -> CacheEntry:
    from raysvc.builds.find_or_build import find_or_build
    from raysvc.builds.mixed_job import jobs_of
    from raysvc.scoring.job_columns import with_found_columns

    if any(one.source.follow for one in jobs_of(job).values()):
        what = "needs somebody who looks for new rows while steps are taken"
        raise ConfigError("source.follow", what, "use raysvc.serve and raysvc.attach")

    entry, missing = with_found_columns(job, find_or_build(job, address, progress, _only_named), progress)
    if missing:
        what = f"the job wants {', '.join(missing)}, which a model computes, and nobody has"
        raise ConfigError("enrich", what, "run raysvc enrich first")
    return entry


def _only_named(address: str | None) -> Place:
    from raysvc.builds.places import in_cluster

    if address is None:
        what = "is more than one process tokenizes in a few seconds"
        remedy = 'run raysvc tokenize first, which uses all cores, or give load(address="local") to start Ray for it'
        raise ConfigError("source", what, remedy)
    return in_cluster(address)


class Loader:
    """One rank's steps of a job; make it with `raysvc.load`.

    Its loop, `commit` and states are those of the client that `raysvc.attach_rank(name, dp_size=R, rank=r)` returns.

    Attributes:
        job: the job.
        entry: the rows.
        rank: of this process.
        dp_size: data-parallel ranks.
    """

    def __init__(
        self,
        job: JobConfig,
        entry: CacheEntry,
        stream: EntryStream,
        rank: int,
        dp_size: int,
        look_ahead_steps: int,
    ) -> None:
        self.job, self.entry, self.rank, self.dp_size = job, entry, rank, dp_size
        self._orders: dict[int, str] = {}  # epoch -> digest of its order by the function of `plan.order`
        self._stream, self._look_ahead_steps = stream, look_ahead_steps
        self._frontier = self._taken = 0  # steps below are committed; were handed out
        self._iteration = 0  # number of the newest one; an older one is refused
        self._threads = ThreadPoolExecutor(1, "raysvc-loader")

    @property
    def loss_ranks(self) -> int:
        """The ranks over which gradients are averaged."""
        return self.dp_size

    def __repr__(self) -> str:
        return f"loader of rank {self.rank} of {self.dp_size}, at step {self.next_step} of {self.schedule.num_steps}"

    def __len__(self) -> int:
        """Steps that are left."""
        return self.schedule.num_steps - self.next_step

    def __iter__(self) -> Iterator[MicroBatch]:
        return self.micro_batches()

    @property
    def schedule(self) -> Schedule:
        """Steps, epochs and mini-batches."""
        return self._stream.schedule

    @property
    def next_step(self) -> int:
        """The next step to train; all before it are committed."""
        return self._frontier

    @property
    def lease(self) -> Lease:
        """Returns what a state says of the rows; nobody else can hold it."""
        stream = self._stream
        return Lease(
            name=self.job.server.name,
            fence=0,
            ttl_s=0.0,
            frontier=self._frontier,
            plan_hash=stream.plan_hash,
            identity=stream.identity,
            entry_key=stream.entry_key,
            schedule=self.schedule.to_json(),
        )

    def steps(
        self, *, stop: int | None = None, rank: int | None = None, world_size: int | None = None
    ) -> Iterator[RankStep]:
        """This rank's shards from the frontier on, as numpy arrays; commit each step.

        Args:
            stop: the first step that is not given.
            rank: of this process from now on; None: as it was.
            world_size: data-parallel ranks from now on; None: as many as there were.

        Raises:
            EntryError: rows are damaged or gone.
            StepOutOfOrder: another iteration, or a state, came between.
        """
        known = optional_integer("steps(stop)", stop, 0)
        size = self.dp_size if world_size is None else world_size
        self.rank = _known_rank("steps", self.rank if rank is None else rank, "world_size", size)
        self.dp_size = size
        self._iteration += 1
        return self._iterate(self._iteration, self.schedule.num_steps if known is None else known)

    def micro_batches(self, device: str = "cpu", *, stop: int | None = None) -> Iterator[MicroBatch]:
        """This rank's micro-batches from the frontier on; commit a step after the one that `ends_step`."""
        return micros_of(self.steps(stop=stop), device)

    def as_torch_dataset(self, device: str = "cpu") -> RankDataset:
        """An `IterableDataset` of this rank's micro-batches; give it to `DataLoader(..., batch_size=None)`.

        A step is committed when the first micro-batch after it is asked for.
        """
        from raysvc.client.torch_dataset import RankDataset

        return RankDataset(self, device, self._state_at)

    def eval(self, name: str) -> Loader:
        """This rank's part of an eval of the job, from its first step; it has a frontier of its own.

        Raises:
            ServerError: the job has no eval of that name.
            ConfigError: its rows lack columns that nobody has computed.
        """
        from raysvc.api import serve_spec
        from raysvc.evals.eval_entries import job_of_eval, needed_columns

        if name not in self.job.evals:
            there = ", ".join(sorted(self.job.evals)) or "none"
            raise ServerError(f"eval {name!r}", "the job has no such eval", f"it has: {there}")
        if self.job.evals[name].source is not None and needed_columns(self.job):
            _entry_of(job_of_eval(self.job, name), None, silent)  # nothing is computed here
        stream = streams_of(
            serve_spec(self.job, self.entry, evals=(name,)).model_copy(update={"journal": ""})
        )[name]
        return Loader(self.job, self.entry, stream, self.rank, self.dp_size, self._look_ahead_steps)

    def num_micro_batches(self) -> int:
        """Micro-batches of this rank in the whole run; plans all steps."""
        outlines = (self._stream.outline(step, self.dp_size) for step in range(self.schedule.num_steps))
        return sum(mini.num_micro_batches for outline in outlines for mini in outline.mini_batches)

    def commit(self, step: int) -> None:
        """Say that all steps up to `step` are trained.

        Raises:
            StepOutOfOrder: it was not handed out yet.
        """
        step = integer("commit(step)", step, 0)
        if step >= self._taken and step > self._frontier:
            newest = max(self._frontier, self._taken - 1)
            expected = f"step {newest} at most, the newest that was handed out or is next"
            raise StepOutOfOrder(self.lease.name, step, expected)
        self._frontier = max(self._frontier, step + 1)

    def state_dict(self) -> dict[str, Any]:
        """The committed frontier, as small JSON; `raysvc.attach` loads it too."""
        return self._state_at(self._frontier)

    def _state_at(self, step: int) -> dict[str, Any]:
        """Returns the state of a trainer that committed the steps below `step`."""
        return {**state_of(self.lease, self.schedule, step, self._orders), "dp_size": self.dp_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state of a loader or of an attached client, on any number of ranks.

        Raises:
            StateMismatch: the state belongs to other rows or another order; it says which.
        """
        frontier = frontier_of(state)
        self._stream.check(state["plan"])
        self.rewind(frontier)
        if order := state["plan"].get("order"):
            self._orders = {order["epoch"]: order["digest"]}

    def rewind(self, step: int) -> None:
        """Make `step` the next one to train.

        Raises:
            StepOutOfOrder: there is no such step.
        """
        step = integer("rewind(step)", step, 0)
        if step > self.schedule.num_steps:
            expected = f"a step from 0 to {self.schedule.num_steps}"
            raise StepOutOfOrder(self.lease.name, step, expected)
        self._frontier = self._taken = step
        self._iteration += 1

    def close(self) -> None:
        """Let go of rows and threads; the loader can be used again."""
        self._iteration += 1
        self._stream.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _iterate(self, iteration: int, stop: int) -> Iterator[RankStep]:
        pending: deque[Future[tuple[StepInfo, tuple[Shard, ...]]]] = deque()
        end = min(stop, self.schedule.num_steps)
        index = upcoming = self._frontier
        try:
            while index < end:
                if self._iteration != iteration:
                    expected = f"a new iteration from step {self._frontier}, after the rewind"
                    raise StepOutOfOrder(self.lease.name, self._frontier, expected)
                while upcoming < min(index + 1 + self._look_ahead_steps, end):
                    pending.append(self._threads.submit(self._make, upcoming))
                    upcoming += 1
                info, shards = pending.popleft().result()
                if info.order is not None:
                    self._orders[info.epoch] = info.order
                index = info.index + 1
                self._taken = max(self._taken, index)
                yield RankStep(
                    info.index,
                    info.epoch,
                    shards,
                    info.mini_batches,
                    read_s=info.read_s,
                    collate_s=info.collate_s,
                )
        finally:
            for one in pending:
                one.cancel()

    def _make(self, step: int) -> tuple[StepInfo, tuple[Shard, ...]]:
        return self._stream.make(step, [Role(self.dp_size)], Part(0, self.rank))
