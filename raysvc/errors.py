"""Every error that raysvc raises on purpose.

RaysvcError
├── UserMistake             the input is wrong; the CLI prints one line and exits with 2
│   ├── ConfigError         a key or value of job.yaml
│   ├── SourceError         files or columns of the rows
│   ├── TokenizerError      the tokenizer or its chat template
│   ├── QuarantineExceeded  too many rows could not be verified
│   ├── StoreError          a cache root that cannot be written or cannot promise create-if-absent
│   ├── EntryError          a cache entry that is missing or damaged
│   │   └── EntryTooNew     a cache entry that a newer version wrote
│   ├── PlanError           rows, groups and budgets that no plan can satisfy
│   ├── StateMismatch       a checkpoint of another run
│   │   ├── CheckpointDamaged   a file of a checkpoint that is not what was written
│   │   └── CheckpointTooOld    a checkpoint of an earlier version, which wrote pickles
│   ├── FolderHeld          a run folder that another server or trainer owns
│   ├── ServerError         a name that is not served, or served with another spec
│   ├── AddressError        a Ray cluster that cannot be reached
│   └── NodeError           files that a node of the cluster does not see
├── LeaseError
│   ├── LeaseHeld           somebody else holds the server
│   │   └── SeatRefused     another process of the same group holds that seat, or the group has another mesh
│   ├── FencedError         this holder was replaced
│   ├── FolderLost          this process does not own its run folder any more
│   ├── VersionMismatch     client and server do not work together
│   ├── RankLost            another rank of the group is dead
│   └── StepOutOfOrder      a step number that the contract does not allow
├── StepFailed              collation of one step failed; carries the step and the cause
├── NoCapacity              a put waited for room, and none came
├── StepNotReady            too few rollouts came for a step
│   └── PromptsEnded        the prompts of a rollout server are through
└── WorkerFailed            a worker did not answer, or answered with an error

Always true:
- constructor arguments are positional and all of them reach `super().__init__`, so an error survives pickling;
- the text is built in `__str__` and ends with the next thing to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from raysvc.redact import redacted


class RaysvcError(Exception):
    """Root of every error raised on purpose."""


class UserMistake(RaysvcError, ValueError):
    """Something that only the user can fix: where it is, what is wrong, what to do.

    Secrets of URLs are taken out of all three texts.

    Args:
        where: the config key, file or name that is wrong.
        what: one clause that says what is wrong with it, with the value.
        remedy: one clause that says what to do.
    """

    def __init__(self, where: str, what: str, remedy: str) -> None:
        where, what, remedy = redacted(where), redacted(what), redacted(remedy)
        super().__init__(where, what, remedy)
        self.where, self.what, self.remedy = where, what, remedy

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.remedy}"


class ConfigError(UserMistake):
    """A key or a value of the job."""


class SourceError(UserMistake):
    """Files, columns or rows of the source."""


class TokenizerError(UserMistake):
    """The tokenizer or its chat template."""


class QuarantineExceeded(UserMistake):
    """More rows than `max_quarantine` could not be verified."""


class StoreError(UserMistake):
    """A cache root that cannot be used safely."""


class EntryError(UserMistake):
    """A cache entry that is missing, damaged, or written by a newer version."""


class EntryTooNew(EntryError):
    """A cache entry of a format that this version cannot read."""


class PlanError(UserMistake):
    """Rows, groups and budgets that no plan can satisfy."""


class StateMismatch(UserMistake):
    """A state that belongs to another plan, entry or run."""


class FolderHeld(UserMistake):
    """A folder that another process owns, which lives."""


class CheckpointDamaged(StateMismatch):
    """A file of a checkpoint that is not what was written: missing, cut off, or with other bytes."""

    @classmethod
    def of(cls, path: object, what: str) -> CheckpointDamaged:
        """Makes the error of a file directly in the checkpoint's folder; `what` goes on after its name."""
        return cls(str(path), what, "restore it, or start again with trainer.resume=false")


class CheckpointTooOld(StateMismatch):
    """A checkpoint of an earlier version, which wrote pickles."""

    @classmethod
    def of(cls, folder: object) -> CheckpointTooOld:
        """Makes the error of a checkpoint's folder."""
        what = "was written by an earlier raysvc, as pickles, which can run code when they are read"
        remedy = (
            "nothing converts it: export its model with the raysvc that wrote it (raysvc export --out DIR), then train with "
            "trainer.model=DIR in another trainer.run_dir, with a new optimizer and from the first step"
        )
        return cls(str(folder), what, remedy)


class ServerError(UserMistake):
    """A server name that is not served, or is served with another spec."""


class AddressError(UserMistake):
    """A Ray cluster that cannot be reached or used."""


class NodeError(UserMistake):
    """Something that a node of the cluster does not see or cannot run."""


class LeaseError(RaysvcError):
    """Something about who may advance a server."""


class LeaseHeld(LeaseError):
    """A second trainer asked for a server that is held.

    Args:
        name: of the server.
        holder: who holds it.
        since_s: for how many seconds.
    """

    def __init__(self, name: str, holder: str, since_s: float) -> None:
        super().__init__(name, holder, since_s)
        self.name, self.holder, self.since_s = name, holder, since_s

    def __str__(self) -> str:
        return (
            f"server {self.name!r} has been held by {self.holder} for {self.since_s:.0f} s; "
            "wait until it detaches, or attach with takeover=True to fence it"
        )


class SeatRefused(LeaseHeld):
    """A process asked for a seat that it cannot have in its own group.

    Args:
        name: of the server.
        holder: who holds the seat, or the lease.
        since_s: for how many seconds the group has held it.
        asked: what it asked for, as the end of "refused a process ...".
    """

    def __init__(self, name: str, holder: str, since_s: float, asked: str) -> None:
        super().__init__(name, holder, since_s)
        self.args = (name, holder, since_s, asked)
        self.asked = asked

    def __str__(self) -> str:
        return (
            f"server {self.name!r} refused a process {self.asked}, held by {self.holder} of the same group for "
            f"{self.since_s:.0f} s; give all processes of the group one mesh and each its own coordinates, and a new start "
            "of the job a group of its own, or wait until the lease of the earlier one ends"
        )


class FencedError(LeaseError):
    """A call with a fence that is no longer the newest.

    Args:
        name: of the server.
        fence: of the caller.
        newest: fence that the server would accept, None when nobody holds it.
    """

    def __init__(self, name: str, fence: int, newest: int | None) -> None:
        super().__init__(name, fence, newest)
        self.name, self.fence, self.newest = name, fence, newest

    def __str__(self) -> str:
        return (
            f"server {self.name!r} refused fence {self.fence}: the newest is {self.newest}; "
            "another trainer took over or the lease ran out, stop this one or attach again"
        )


class FolderLost(LeaseError):
    """A process wrote into a folder that it does not own any more.

    Args:
        folder: path or URL.
        why: one clause.
        owner: this process.
    """

    def __init__(self, folder: str, why: str, owner: str) -> None:
        folder = redacted(folder)
        super().__init__(folder, why, owner)
        self.folder, self.why, self.owner = folder, why, owner

    def __str__(self) -> str:
        return (
            f"{self.folder}: {self.owner} does not own this folder any more: {self.why}; "
            "it stops without changing what is there, stop it and go on with the one that owns it"
        )


class VersionMismatch(LeaseError):
    """A client and a server of versions that do not work together.

    Args:
        name: of the server.
        client: its version.
        server: its version.
    """

    def __init__(self, name: str, client: str, server: str) -> None:
        super().__init__(name, client, server)
        self.name, self.client, self.server = name, client, server

    def __str__(self) -> str:
        same = f"`pip install raysvc=={self.server}` where you train" if self.server[:1].isdigit() else ""
        again = f"`raysvc stop {self.name}` and serve it again with raysvc {self.client}"
        return (
            f"server {self.name!r} runs raysvc {self.server} and this client {self.client}, and they need the same minor "
            f"version; run {f'{same}, or {again}' if same else again}"
        )


class RankLost(LeaseError):
    """Another rank of this group gave no sign of life for a whole lease.

    Args:
        name: of the server.
        rank: that is silent: the number of its seat.
        holder: its host, process and attach.
        silent_s: for how many seconds.
        seat: the rank in words, with its coordinates in a mesh.
    """

    def __init__(self, name: str, rank: int, holder: str, silent_s: float, seat: str) -> None:
        super().__init__(name, rank, holder, silent_s, seat)
        self.name, self.rank, self.holder, self.silent_s, self.seat = name, rank, holder, silent_s, seat

    def __str__(self) -> str:
        return (
            f"{self.seat} of server {self.name!r} ({self.holder}) has been silent for {self.silent_s:.0f} s; "
            "start all ranks again from the last checkpoint"
        )


class StepOutOfOrder(LeaseError, IndexError):
    """A step that may not be fetched or committed now.

    Args:
        name: of the server.
        step: that was asked for.
        expected: what would be right, in words.
    """

    def __init__(self, name: str, step: int, expected: str) -> None:
        super().__init__(name, step, expected)
        self.name, self.step, self.expected = name, step, expected

    def __str__(self) -> str:
        return f"server {self.name!r} refused step {self.step}: expected {self.expected}; ask for that, or rewind"


class StepFailed(RaysvcError):
    """Planning or collating one step failed.

    Args:
        name: of the server.
        step: that failed.
        cause: the first line of the error below.
    """

    def __init__(self, name: str, step: int, cause: str) -> None:
        super().__init__(name, step, cause)
        self.name, self.step, self.cause = name, step, cause

    def __str__(self) -> str:
        return f"server {self.name!r} could not make step {self.step}: {self.cause}; look at the server's log"


SHOWN = 5  # prompts that a text names


class StepNotReady(RaysvcError):
    """Too few groups came in time for a step.

    Args:
        name: of the server.
        step: that was asked for.
        ready: groups that are there.
        needed: groups of a step.
        missing: prompts that are reserved, open or wait for late columns, the oldest first: uid, which of the three,
            owner, seconds.
    """

    def __init__(
        self,
        name: str,
        step: int,
        ready: int,
        needed: int,
        missing: Sequence[tuple[str, str, str, float]] = (),
    ) -> None:
        super().__init__(name, step, ready, needed, missing)
        self.name, self.step, self.ready, self.needed, self.missing = name, step, ready, needed, missing

    def __str__(self) -> str:
        head = f"server {self.name!r} has {self.ready} of the {self.needed} groups of step {self.step}"
        if not self.missing:
            return (
                f"{head}, and no prompt is reserved or open; start producers, or ask producer.status(uids) "
                "whether their prompts were put before"
            )
        told = [
            f"{uid!r} {state}{f' by {owner}' if owner else ''} for {held_s:.0f} s"
            for uid, state, owner, held_s in self.missing[:SHOWN]
        ]
        more = f" and {len(self.missing) - SHOWN} more" if len(self.missing) > SHOWN else ""
        return f"{head}; under way: {', '.join(told)}{more}; look at these producers, or ask again"


class PromptsEnded(StepNotReady):
    """The prompts of a rollout server are through, and too few groups are left for a step; `steps()` ends there."""

    def __str__(self) -> str:
        return (
            f"the prompts of server {self.name!r} have ended, and {self.ready} of the {self.needed} groups of step {self.step} are left; "
            "raise plan.epochs of the job of prompts, or end the loop"
        )


class NoCapacity(RaysvcError):
    """A put of groups that were not reserved waited for capacity, and none came.

    Args:
        name: of the server.
        waited_s: how long.
    """

    def __init__(self, name: str, waited_s: float) -> None:
        super().__init__(name, waited_s)
        self.name, self.waited_s = name, waited_s

    def __str__(self) -> str:
        return (
            f"server {self.name!r} had no capacity for {self.waited_s:.0f} s; "
            "check that the trainer commits steps, or reserve prompts before they are sampled"
        )


_RESUME = "run again to resume from the last checkpoint"


class WorkerFailed(RaysvcError):
    """A worker died, hung or raised.

    Args:
        rank: of the worker.
        call: the method that was called.
        cause: the first line of the error below; of a death the process and its node.
        again: the command that resumes the run, where one is known.
    """

    def __init__(self, rank: int, call: str, cause: str, again: str = "") -> None:
        super().__init__(rank, call, cause, again)
        self.rank, self.call, self.cause, self.again = rank, call, cause, again

    def __str__(self) -> str:
        resume = f"resume from the last checkpoint with: {self.again}" if self.again else _RESUME
        return f"worker of rank {self.rank} failed in {self.call}: {self.cause}; {resume}"


@contextmanager
def keys_under(section: str) -> Iterator[None]:
    """A mistake in a key of `source` is raised with the key that it has where that source stands.

    Args:
        section: dotted key of what the source is of, such as `evals.held`.
    """
    try:
        yield
    except UserMistake as error:
        if not (error.where == "source" or error.where.startswith(("source.", "source:"))):
            raise
        raise type(error)(f"{section}.{error.where}", error.what, error.remedy) from None
