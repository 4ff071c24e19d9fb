"""The entry of a job: look it up, and make what is missing.

1. Look at all sources and the cache (`raysvc.builds.lookup`), and ask whether anything stands in the way of what follows the rows.
2. Where there is no finished entry, see what is left of it (`raysvc.builds.build`).
3. Make the slices that are left, at some place (`raysvc.builds.places`), in the order in which they are needed.
4. Finish each entry when its last slice is there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from raysvc.builds.build import Build, Resumable
from raysvc.builds.cache_entry import CacheEntry
from raysvc.builds.followed_build import FollowedBuild
from raysvc.builds.lookup import Lookup, look
from raysvc.builds.mixed_job import jobs_of, paths_of
from raysvc.builds.places import from_dataset, in_cluster, in_this_process
from raysvc.builds.streamed_build import StreamedBuild
from raysvc.cache.entry import Entry
from raysvc.cache.store.open import default_root
from raysvc.job.config import JobConfig
from raysvc.progress import Progress, Tick, silent

if TYPE_CHECKING:
    from raysvc.builds.places import Check, Place
    from raysvc.cache.manifest import Receipt

    Before = Callable[[Lookup, bool], None]


def nothing(found: Lookup, grows: bool) -> None:
    """Ask nothing before entries are built."""


def find_or_build(
    job: JobConfig,
    address: str | None,
    progress: Progress,
    large: Callable[[str | None], Place] = in_cluster,
    before: Before = nothing,
) -> CacheEntry:
    """The entries of a job, built where they are not there.

    Args:
        address: of the cluster that builds what is large.
        large: the place at that address.
        before: is called before an entry is built, with each source, and whether its rows are read while they are built; what it
            raises ends that.

    Raises:
        UserMistake: files, columns, tokenizer, template or cache root that cannot be used.
    """
    join(job, address)
    found = [look(each, default_root(each.cache.root), name) for name, each in jobs_of(job).items()]
    for one in found:
        before(one, False)
    return as_one(job, found, [one.entry or build(one, address, progress, large) for one in found])


def join(job: JobConfig, address: str | None) -> None:
    """Join the cluster, or start one, where a source of the job is a Ray Dataset, which is looked at there."""
    if any(each.source.ray is not None for each in jobs_of(job).values()):
        from raysvc.cluster import connect

        connect(address)


def as_one(job: JobConfig, found: Sequence[Lookup], entries: Sequence[Entry]) -> CacheEntry:
    """The entries of a job's sources as a user holds them.

    Args:
        found: the lookup of each source; it tells why its entry is used or built.
        entries: of each source.
    """
    hit = all(one.entry is not None for one in found)
    if job.mixture is None:
        return CacheEntry(tuple(entries), hit, found[0].reason, paths=paths_of(job))
    told = "; ".join(f"{one.name}: {one.reason}" for one in found)
    return CacheEntry(tuple(entries), hit, told, tuple(job.mixture.sources), paths_of(job))


def begin(found: Lookup, progress: Progress = silent, number: int = 0, *, until_now: bool = False) -> Build:
    """A build of an entry that was not found.

    Args:
        number: of the source in its mixture.
        until_now: of a source that is followed, only what is there now.

    Raises:
        ConfigError: the job wants of a source that is followed what is known only at the end.
        StoreError: nothing can be built there.
    """
    if found.job.source.follow:
        return FollowedBuild(found, progress, number, until_now=until_now)
    if found.job.source.ray is not None:
        return StreamedBuild(found, progress, number)
    return Build(found, progress, number)


def build(
    found: Lookup,
    address: str | None,
    progress: Progress,
    large: Callable[[str | None], Place] = in_cluster,
) -> Entry:
    """Make the entry that was not found, in this process where it is small."""
    one = begin(found, progress, until_now=True)
    with one.hold:
        one.start()
        if one.streams:
            return run([one], from_dataset)[0]
        if not one.fits_one_process(one.left):
            return run([one], large(address))[0]
        from raysvc.pipelines.local_build import only_builder_here

        waiting = Tick("tokenize", 0, None, "rows", waiting="another process builds this entry")
        with only_builder_here(one.writer.uri, lambda: progress(waiting)) if one.left else nullcontext():
            return run([one], in_this_process)[0]


def run(
    builds: Sequence[Resumable],
    place: Callable[[Any, Any, Check], Iterator[tuple[int, Receipt]]],
    order: Sequence[tuple[int, int]] | None = None,
    check: Check = lambda: None,
) -> dict[int, Entry]:
    """Make what is left of some entries, and finish each when its last slice is there.

    Args:
        builds: of the entries.
        place: makes slices, see `raysvc.builds.places`.
        order: number of the build and index of each slice that is needed, as they are needed; None: all of them, one entry after the
            other.
        check: is called while slices are made; what it raises ends that.

    Returns:
        The finished entries by number of their build; one whose source has no end is not among them.
    """
    entries: dict[int, Entry] = {}
    for number, one in enumerate(builds):
        one.start(None if order is None else _of(number, order))
    missing = {(number, piece.index): piece for number, one in enumerate(builds) for piece in one.left}
    left = [(key[0], missing[key]) for key in (missing if order is None else order) if key in missing]

    def finish(number: int) -> None:
        if number not in entries and builds[number].is_complete:
            entries[number] = builds[number].finish()

    for number in range(len(builds)):
        finish(number)
    for number, receipt in place(builds, left, check) if left else ():
        builds[number].add(receipt)
        finish(number)
    return entries


def _of(number: int, order: Sequence[tuple[int, int]]) -> Collection[int]:
    return {index for one, index in order if one == number}
