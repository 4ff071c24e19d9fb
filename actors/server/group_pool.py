"""Which groups are ready, which step has which, and who may still produce. Pure: no clock, no disk.

With b groups per step, and weights that were version v when step f was next: step k is trained by version v + (k - f)
at the latest (a version per step at most), so a group of version w is v + (k - f) - w old by then.
Always true:
- a group is in one step at most, and a step has b groups; groups are taken in the order they were put;
- k's groups are all at most `max_staleness` versions old when step k is trained; older ones are evicted;
- (uid, attempt) is taken once, however often it is put;
- a step below `kept_from` is never formed, and its groups never come back;
- capacity = (max_staleness + 1) * b - ready - planned and not committed - reserved: what is evicted, dropped,
  released or trained gives capacity back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Key = tuple[str, int]


@dataclass(frozen=True)
class Ready:
    """A group that may be planned.

    Attributes:
        key: uid and attempt.
        version: of the weights that sampled it.
    """

    key: Key
    version: int


@dataclass
class Pool:
    """The state of all groups.

    Attributes:
        batch_size: groups of a step.
        max_staleness: None: any age.
        version: of the weights that train.
        version_step: the step that was next when `version` was told.
        ready: not planned, in the order they were put.
        steps: step -> its groups.
        versions: of every key that was ever put.
        reserved: uids that a producer is working on.
        evicted: groups that became too old.
        kept_from: steps below are forgotten.
    """

    batch_size: int
    max_staleness: int | None = None
    version: int = 0
    version_step: int = 0
    ready: list[Ready] = field(default_factory=list)
    steps: dict[int, list[Key]] = field(default_factory=dict)
    versions: dict[Key, int] = field(default_factory=dict)
    reserved: set[str] = field(default_factory=set)
    evicted: int = 0
    kept_from: int = 0

    def put(self, group: Ready) -> bool:
        """Add a group; False when it was put before."""
        self.reserved.discard(group.key[0])
        if group.key in self.versions:
            return False
        self.versions[group.key] = group.version
        self.ready.append(group)
        return True

    def form(self, step: int, frontier: int) -> list[Key] | None:
        """The groups of `step`, planned now or before; None while there are not enough.

        Steps form in order: a step after one that is not formed waits for it.
        """
        if step in self.steps:
            return self.steps[step]
        assert step >= self.kept_from, "refused where it was asked for"
        if step > frontier and step - 1 not in self.steps:
            return None
        self.evict(self.trained_by(step))
        if len(self.ready) < self.batch_size:
            return None
        taken, self.ready = self.ready[: self.batch_size], self.ready[self.batch_size :]
        self.steps[step] = [group.key for group in taken]
        return self.steps[step]

    def trained_by(self, step: int) -> int:
        """The newest weight version that can train `step`."""
        return self.version + max(0, step - self.version_step)

    def set_version(self, version: int, frontier: int) -> None:
        """The weights that train are `version` from step `frontier` on.

        Raises:
            ValueError: it goes back, or makes a planned step's groups too old.
        """
        if version < self.version:
            raise ValueError(f"{version} is below {self.version}")
        for step, keys in self.steps.items():
            oldest = min(self.versions[key] for key in keys)
            age = version + step - frontier - oldest
            if step >= frontier and self.max_staleness is not None and age > self.max_staleness:
                raise ValueError(f"{version} would train step {step} with groups {age} versions old")
        self.version, self.version_step = version, frontier
        self.evict(self.trained_by(max([frontier, *(step + 1 for step in self.steps)])))

    def evict(self, version: int) -> list[Key]:
        """Drop what is too old for weights of `version`."""
        if self.max_staleness is None:
            return []
        oldest = version - self.max_staleness
        old = [group.key for group in self.ready if group.version < oldest]
        self.ready = [group for group in self.ready if group.version >= oldest]
        self.evicted += len(old)
        return old

    def drop(self, uids: list[str]) -> list[Key]:
        """A filter threw the ready groups of these prompts away; returns what went."""
        gone = [group.key for group in self.ready if group.key[0] in uids]
        self.ready = [group for group in self.ready if group.key not in gone]
        return gone

    def forget_below(self, step: int) -> list[Key]:
        """Let go of the steps below `step`; returns their groups."""
        self.kept_from = max(self.kept_from, step)
        old = [number for number in self.steps if number < self.kept_from]
        return [key for number in old for key in self.steps.pop(number)]

    def trained(self, frontier: int) -> int:
        """Groups of committed steps."""
        kept = sum(len(keys) for step, keys in self.steps.items() if step < frontier)
        return kept + self.kept_from * self.batch_size

    def capacity(self, frontier: int) -> int | None:
        """How many groups may still be started; None: no bound."""
        if self.max_staleness is None:
            return None
        planned = sum(len(keys) for step, keys in self.steps.items() if step >= frontier)
        held = len(self.ready) + planned + len(self.reserved)
        return max(0, (self.max_staleness + 1) * self.batch_size - held)

    def reserve(self, uids: list[str], frontier: int) -> list[str]:
        """The uids that a producer may start on: as many as there is capacity. Asking again changes nothing."""
        mine = [uid for uid in uids if uid in self.reserved]
        new = [uid for uid in uids if uid not in self.reserved]
        room = self.capacity(frontier)
        granted = new if room is None else new[:room]
        self.reserved.update(granted)
        return [*mine, *granted]

    def release(self, uids: list[str]) -> None:
        """A producer gave up on these."""
        self.reserved.difference_update(uids)
