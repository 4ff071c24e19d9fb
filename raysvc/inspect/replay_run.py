"""A step once more, without a server: the bytes that its trainer was handed.

Always true:
- the same code makes the step that the server runs, from what the run's `served.jsonl` says of that step, else from
  the job file, and from the decisions of its trainer;
- rows that differ from those of the run's row log are an error;
- nothing is written, no Ray is started;
- for rollouts the groups come from the spool of the run folder; where that is gone, an error says so.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from raysvc.builds.serve_log import FILE, read_served
from raysvc.errors import ConfigError, EntryError
from raysvc.job.column_dtypes import BF16
from raysvc.row_ids import written

if TYPE_CHECKING:
    from pathlib import Path

    from raysvc.actors.rollouts.rollout_stream import RolloutStream
    from raysvc.actors.rollouts.turn_merger import BrokenTurn
    from raysvc.actors.server.entry_stream import EntryStream
    from raysvc.actors.server.spec import ServeSpec, StepInfo
    from raysvc.collate.shard import Shard
    from raysvc.job.config import JobConfig
    from raysvc.plan.schedule import Schedule

ROWS = "rows.jsonl"


@dataclass(frozen=True, eq=False)
class ReplayedStep:
    """A step that was made again.

    Attributes:
        info: what its driver learned.
        shards: [mini][rank].
        schedule: of the run.
        spec: how it was served.
        recorded: the run wrote `spec` down; False: it comes from the job file.
        broken: turns of rollouts that do not begin with the turn before.
    """

    info: StepInfo
    shards: tuple[tuple[Shard, ...], ...]
    schedule: Schedule
    spec: ServeSpec
    recorded: bool
    broken: tuple[BrokenTurn, ...] = ()

    @property
    def dp_size(self) -> int:
        """Ranks."""
        return len(self.shards[0])

    def chosen(self, rank: int | None = None) -> list[Shard]:
        """The shards of a rank, or all of them, mini-batch after mini-batch.

        Raises:
            ConfigError: there is no such rank.
        """
        if rank is not None and not 0 <= rank < self.dp_size:
            raise ConfigError("--rank", f"{rank} must be in [0, {self.dp_size})", "give one of them")
        return [shard for mini in self.shards for shard in mini if rank in (None, shard.rank)]

    def checksum(self, rank: int | None = None) -> str:
        """sha256 over the digests of the chosen shards."""
        return hashlib.sha256("".join(shard.digest() for shard in self.chosen(rank)).encode()).hexdigest()


def replay_job(job: JobConfig, step: int, dp_size: int | None = None) -> ReplayedStep:
    """A step of a job's run.

    Args:
        step: 0-based.
        dp_size: None: that of the run, else `trainer.dp_size`.

    Raises:
        ConfigError: there is no such step.
        EntryError: the entry is not built, or gone; the row log has other rows.
    """
    from raysvc.cache.store.open import absolute

    folder = absolute(job.run_dir)
    served = read_served(folder, step, job.cache.storage_options)
    if served is not None:
        ranks = dp_size or served.dp_size or job.trainer.dp_size
        return _made(served.spec, folder, step, ranks, recorded=True)
    return _made(_spec_of(job), folder, step, dp_size or job.trainer.dp_size, recorded=False)


def replay_run(
    run_dir: str, step: int, dp_size: int | None = None, storage_options: Mapping[str, Any] | None = None
) -> ReplayedStep:
    """A step of a run that has no job file, like one of rollouts.

    Raises:
        ConfigError: the folder does not say how its steps were made, or for how many ranks.
        EntryError: the groups of the step are not in the spool; the row log has other rows.
    """
    from raysvc.cache.store.open import absolute

    served = read_served(absolute(run_dir), step, storage_options)
    if served is None:
        raise ConfigError(run_dir, f"has no {FILE}", "name its job with -c")
    ranks = dp_size or served.dp_size
    if ranks is None:
        what = "its trainer is not ours, so the number of ranks is not known"
        raise ConfigError("--dp-size", what, "give the dp_size it attached with")
    return _made(served.spec, absolute(run_dir), step, ranks, recorded=True)


def save(shards: list[Shard], path: Path) -> None:
    """Write arrays as `mini<m>.rank<r>.<name>`, to a `.safetensors` or an `.npz` file.

    What safetensors has no name for in numpy is in its metadata: text as JSON, and the names of arrays of uint16 that hold
    the bits of bfloat16 (`bfloat16`, a JSON list).

    Raises:
        ConfigError: the name ends otherwise.
    """
    arrays = {f"mini{shard.mini}.rank{shard.rank}.{name}": np.ascontiguousarray(array)
              for shard in shards for name, array in {**shard.arrays, "row_ids": shard.row_ids}.items()}  # fmt: skip
    if path.suffix == ".npz":
        np.savez(path, **arrays)  # type: ignore[arg-type]
    elif path.suffix == ".safetensors":
        from safetensors.numpy import save_file

        texts = {
            name: json.dumps(array.tolist()) for name, array in arrays.items() if array.dtype.kind == "U"
        }
        halves = [name for name, array in arrays.items() if array.dtype == BF16]
        plain = {name: array for name, array in arrays.items() if name not in texts}
        plain |= {name: np.ascontiguousarray(arrays[name]["bfloat16"]) for name in halves}
        save_file(
            plain, path, metadata={**texts, "bfloat16": json.dumps(halves)} if texts or halves else None
        )
    else:
        raise ConfigError(f"--out {path}", "ends in neither .safetensors nor .npz", "choose one of them")


def _spec_of(job: JobConfig) -> ServeSpec:
    from raysvc.api import cache_root, serve_spec, tokenize
    from raysvc.builds.lookup import explain_job
    from raysvc.builds.mixed_job import jobs_of
    from raysvc.scoring.job_columns import with_found_columns

    if any(one.source.follow for one in jobs_of(job).values()):
        followed: ServeSpec = serve_spec(job, tokenize(job), evals=())
        return followed
    jobs = jobs_of(job).values()
    if not all(explain_job(one, cache_root(one))["hit"] for one in jobs):
        raise EntryError("the job's entry", "is not built", "run raysvc tokenize first")
    entry, missing = with_found_columns(job, tokenize(job))
    if missing:
        raise EntryError("the job's entry", f"has no {', '.join(missing)}", "run raysvc enrich first")
    spec: ServeSpec = serve_spec(job, entry, evals=())
    return spec


def _made(spec: ServeSpec, run_dir: str, step: int, dp_size: int, *, recorded: bool) -> ReplayedStep:
    rollouts = open_rollouts(spec, step) if spec.rollouts else None
    stream = rollouts or _rows(spec, run_dir, step)
    try:
        info, shards = stream.make(step, (dp_size,))
    except KeyError as error:  # a file of the spool is gone
        what = f"group {error.args[0]} of step {step} is gone"
        raise EntryError(
            f"{spec.journal}/rollouts",
            what,
            "keep that folder: the groups of a rollout server are nowhere else",
        ) from None
    _check_logged(run_dir, step, info, spec.storage_options)
    minis = tuple(shards[start : start + dp_size] for start in range(0, len(shards), dp_size))
    broken = tuple(rollouts.broken_turns(step)) if rollouts else ()
    return ReplayedStep(info, minis, stream.schedule, spec, recorded, broken)


def _check_logged(run_dir: str, step: int, info: StepInfo, storage_options: Mapping[str, Any]) -> None:
    """Compare the rows of a step that was made again with the row log, if there is one that has the step."""
    import fsspec

    logged: list[list[str | int]] = []
    try:
        with fsspec.open(f"{run_dir}/{ROWS}", "rb", **storage_options) as file:
            lines = [line for line in file if line.startswith(b'{"step":%d,' % step) and line.endswith(b"\n")]
            logged = [
                json.loads(line)["row_ids"] for line in lines
            ]  # what is torn is of a run that was killed
    except FileNotFoundError:
        return
    except (ValueError, KeyError):
        remedy = "restore it, or move it away to replay without a comparison"
        raise EntryError(f"{run_dir}/{ROWS}", f"has a damaged line of step {step}", remedy) from None
    if any(isinstance(row, int) for rows in logged for row in rows):
        what = "names rows by numbers, as raysvc did before rows were source:slice:row"
        raise EntryError(f"{run_dir}/{ROWS}", what, "use the raysvc version that wrote it")
    made = [list(map(written, mini.row_ids.tolist())) for mini in info.mini_batches]
    if logged and logged[: len(made)] != made:
        what = f"step {step} had other rows than those that can be made again"
        remedy = "restore server/feedback of the run folder, and the entry, as they were in the run"
        raise EntryError(f"{run_dir}/{ROWS}", what, remedy)


def _rows(spec: ServeSpec, run_dir: str, step: int) -> EntryStream:
    from raysvc.actors.server.entry_stream import EntryStream, feedback_log
    from raysvc.actors.server.make_step import Recipe

    stream = EntryStream(
        spec.sources,
        spec.storage_options,
        Recipe(spec.plan, spec.pad_token_id),
        spec.mixture,
        feedback=feedback_log(f"{run_dir}/server", spec.storage_options),
    )
    num_steps = stream.schedule.num_steps
    if step in range(num_steps) and not stream.is_there(step):
        what = f"has no step {step} yet: its rows are not there, or not tokenized"
        raise EntryError(f"the source of {spec.name!r}", what, "run raysvc tokenize, or wait for new files")
    if not 0 <= step < num_steps:
        raise ConfigError("--step", f"{step} is not below the {num_steps} steps", "give a smaller one")
    return stream


def open_rollouts(spec: ServeSpec, step: int | None = None) -> RolloutStream:
    """The groups and steps of a rollout server, to be read.

    Raises:
        ConfigError: it has no such step.
        EntryError: its groups are gone, or a file of them is damaged.
    """
    import fsspec

    from raysvc.actors.rollouts.rollout_stream import RolloutStream
    from raysvc.actors.server.make_step import Recipe

    assert spec.rollouts is not None
    folder = f"{spec.journal}/rollouts"
    fs, root = fsspec.core.url_to_fs(folder, **spec.storage_options)
    if not fs.exists(f"{root}/groups"):
        raise EntryError(
            folder,
            "the groups that were put are gone",
            "keep that folder: the groups of a rollout server are nowhere else",
        )
    recipe = Recipe(spec.plan, spec.pad_token_id)
    stream = RolloutStream(spec.name, spec.rollouts, recipe, folder, spec.storage_options)
    try:
        stream.store  # noqa: B018 - the first use reads all files
    except OSError as error:
        if error.errno is not None:
            raise
        raise EntryError(folder, f"has a damaged file ({error})", "restore that folder") from None
    if step is not None and step not in stream.pool.steps:
        what = f"{step} is not one of the {len(stream.pool.steps)} steps that were formed"
        raise ConfigError("--step", what, "give one of them")
    return stream
