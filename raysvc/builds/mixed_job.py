"""A job's mixture: one job per source, and the counts of each stage.

Axes: K sources.
Always true:
- every source is tokenized by the same rules, into an entry that a job with that source alone would use;
- the counts depend on the config and on the rows and tokens of the entries, on nothing else;
- a source that is appended with a later `from_step` leaves all earlier stages as they were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from raysvc.cache.key import rows_key
from raysvc.errors import PlanError
from raysvc.evals.held_rows import trained_rows
from raysvc.plan.entry_plan import chosen_entries, count_groups, weighted_counts
from raysvc.plan.mixture import counts_by_epochs, groups_of_epoch
from raysvc.plan.plan import schedule_of
from raysvc.redact import redacted

if TYPE_CHECKING:
    from raysvc.actors.server.spec import MixtureSpec
    from raysvc.cache.entry import Entry
    from raysvc.job.config import JobConfig, MixtureConfig

Stages = tuple[tuple[int, tuple[int, ...]], ...]


def jobs_of(job: JobConfig) -> dict[str, JobConfig]:
    """Name of a source -> the job that tokenizes it; "" -> the job itself, where it has one source."""
    if job.mixture is None:
        return {"": job}
    return {
        name: job.model_copy(update={"source": each.source, "mixture": None})
        for name, each in job.mixture.sources.items()
    }


def paths_of(job: JobConfig) -> tuple[str, ...]:
    """The files of a job, source after source, or what else its rows come from; without credentials."""
    return tuple(redacted(path) for one in jobs_of(job).values() for path in one.source.names)


def mixture_spec(job: JobConfig, entries: Sequence[Entry]) -> MixtureSpec | None:
    """Returns what a server needs of the job's mixture; None when the job has none."""
    from raysvc.actors.server.spec import MixtureSpec

    if job.mixture is None:
        return None
    return MixtureSpec(
        names=tuple(job.mixture.sources),
        stages=stages_of(job, entries),
        shuffles=shuffles_of(job),
        by=job.mixture.by,
    )


def stages_of(job: JobConfig, entries: Sequence[Entry]) -> Stages:
    """Stream position of each stage and its counts; a stage begins where a source joins. None without a mixture."""
    mixture = job.mixture
    if mixture is None:
        return ()
    _refuse_twice(dict(zip(mixture.sources, entries, strict=True)))
    plan = job.plan.model_copy(update={"rows": trained_rows(job, entries)})
    entries = chosen_entries(plan, entries, shuffles_of(job))
    stages: list[tuple[int, tuple[int, ...]]] = []
    for step in sorted({each.from_step for each in mixture.sources.values()}):
        first = 0
        if stages:
            sizes = [count_groups(*each) for each in zip(entries, _shuffles(job, mixture), strict=True)]
            schedule = schedule_of(job.plan, groups_of_epoch(stages[0][1], sizes))
            first = schedule.epoch_of(step) * schedule.num_groups + schedule.position_of(step)
        stages.append((first, _counts(job, mixture, step, entries)))
    return tuple(stages)


def _refuse_twice(entries: Mapping[str, Entry]) -> None:
    """Sources of a mixture are told apart by the rows that they have."""
    names: dict[str, str] = {}
    for name, entry in entries.items():
        other = names.setdefault(rows_key(entry.key, entry.recipe), name)
        if other != name:
            remedy = "keep one of them, with the weights or epochs of both added up"
            raise PlanError("mixture.sources", f"{other!r} and {name!r} have the same rows", remedy)


def never_trained(job: JobConfig, stages: Stages) -> list[str]:
    """Sources whose weight or epochs are above 0 and too small for a single row of an epoch."""
    if job.mixture is None:
        return []
    some = {place for _, counts in stages for place, count in enumerate(counts) if count}
    sources = enumerate(job.mixture.sources.items())
    return [name for place, (name, each) in sources if (each.weight or each.epochs) and place not in some]


def shuffles_of(job: JobConfig) -> tuple[str | None, ...]:
    """The shuffle of each source of a mixture that has its own; () where none has."""
    found = tuple(each.shuffle for each in job.mixture.sources.values()) if job.mixture else ()
    return found if any(found) else ()


def _shuffles(job: JobConfig, mixture: MixtureConfig) -> list[str]:
    """Returns the shuffle of each source."""
    return [each.shuffle or job.plan.shuffle for each in mixture.sources.values()]


def _counts(job: JobConfig, mixture: MixtureConfig, step: int, entries: Sequence[Entry]) -> tuple[int, ...]:
    """Groups of each source in a period, of those that have joined by `step`."""
    joined = [each.from_step <= step for each in mixture.sources.values()]
    known = [entry for entry, here in zip(entries, joined, strict=True) if here]
    shares = [each for each, here in zip(mixture.sources.values(), joined, strict=True) if here]
    shuffles = [one for one, here in zip(_shuffles(job, mixture), joined, strict=True) if here]
    if shares[0].epochs is not None:
        groups = [count_groups(*each) for each in zip(known, shuffles, strict=True)]
        counts = counts_by_epochs([each.epochs or 0 for each in shares], groups)
    else:
        counts = weighted_counts(known, [each.weight or 0 for each in shares], mixture.by, shuffles)
    if not sum(counts):
        raise PlanError("mixture", f"no row comes from step {step} on", "give more epochs or weights above 0")
    each_count = iter(counts)
    until = max(place for place, here in enumerate(joined) if here) + 1  # so that a source can be appended
    return tuple(next(each_count) if here else 0 for here in joined[:until])
