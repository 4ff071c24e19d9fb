"""Decides which groups are ready, which step has which, and who may still produce. Pure: no disk, the clock is an argument.

With b groups per step, and weights that were version v when step f was next: step k is trained by version v + (k - f)
at the latest (a version per step at most), so a group of version w is v + (k - f) - w old by then.
Always true:
- a group is in one step at most, and a step has b slots, fewer if no more groups come; groups are taken in the order in which they
  became complete;
- k's groups are all at most `max_staleness` versions old when step k is trained; older ones are evicted;
- (uid, attempt) is taken once, however often it is put; an open group grows, and is taken when it is complete;
- a step below `kept_from` is never formed, and its groups never come back;
- going back to a step restores the version that trained it, keeps the groups of all formed steps, and begins a new
  timeline; what evictions, drops and quarantine took stays away;
- capacity = (max_staleness + 1) * b - ready - waiting - planned and not committed - reserved, and room for slots to fill: what is evicted, dropped,
  released, expired or trained gives capacity back;
- where `on_stale` is `pace`, a step waits for prompts that are under way rather than make them too old: of the groups that no step has
  yet, those of version w and below are never more than the steps that weights up to w + `max_staleness` can train, and the oldest
  are taken first;
- no call but `load` walks all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from raysvc.actors.rollouts.forgotten_keys import ForgottenKeys
from raysvc.actors.rollouts.forgotten_keys import Key as Key

if TYPE_CHECKING:
    from raysvc.actors.server.spec import OnStale

OnBadGroup = Literal["fill", "shrink"]
FOREVER_S = float("inf")


@dataclass(frozen=True)
class ReadyGroup:
    """A group that may be planned.

    Attributes:
        key: uid and attempt.
        version: of the weights that sampled it.
    """

    key: Key
    version: int


class Timeline(NamedTuple):
    """A training history that begins where its trainer went back.

    Attributes:
        number: 0 is the first.
        begin: its first step.
        version: of the weights that train this step.
        abandoned_until: the steps from `begin` to here were trained on the timeline before, and that is void.
    """

    number: int
    begin: int
    version: int
    abandoned_until: int


@dataclass
class Pool:
    """The state of all groups.

    Attributes:
        batch_size: groups of a step.
        max_staleness: None: any age.
        on_bad_group: whether the slot of a quarantined group is filled from the ready ones, or stays empty.
        told: (step, version) of this timeline, ascending: `version` trains from `step` on.
        timelines: each time a trainer went back.
        reached: the highest frontier of this timeline that is known.
        newest: the highest version that was told on any timeline.
        ready: complete and not planned, in the order in which they became so.
        waiting: known and not complete; key -> version.
        steps: step -> its groups.
        versions: of every key that was put and is not forgotten.
        reserved: uid -> the producer that is working on it.
        leases: producer -> until when its reservations and open groups hold.
        owners: open group -> its producer.
        since: uid of a reserved, open or waiting group -> clock value of its reservation or first row.
        step_of: group -> the step it is in, or was quarantined from.
        evicted: groups that became too old.
        stale: puts that were refused because they were too old when they came, since the server started.
        quarantined: group -> why it cannot be trained.
        kept_from: steps below are forgotten.
        forgotten: groups that went with them, for good.
        trained_before: groups that they trained.
        on_stale: what is done about groups that get too old; with `train` nothing: `max_staleness` bounds what may be started, alone.
        trained_from: group of a formed step -> the oldest weight version whose sequences are trained, where others are withheld; as it was
            when the group was chosen: what is withheld stays so.
        granted: uid of a reserved prompt of a stream -> the version that trained when it was handed out.
    """

    batch_size: int
    max_staleness: int | None = None
    on_bad_group: OnBadGroup = "fill"
    told: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    timelines: list[Timeline] = field(default_factory=list)
    reached: int = 0
    newest: int = 0
    ready: list[ReadyGroup] = field(default_factory=list)
    waiting: dict[Key, int] = field(default_factory=dict)
    steps: dict[int, list[Key]] = field(default_factory=dict)
    versions: dict[Key, int] = field(default_factory=dict)
    reserved: dict[str, str] = field(default_factory=dict)
    leases: dict[str, float] = field(default_factory=dict)
    owners: dict[Key, str] = field(default_factory=dict)
    since: dict[str, float] = field(default_factory=dict)
    step_of: dict[Key, int] = field(default_factory=dict)
    evicted: int = 0
    stale: int = 0
    quarantined: dict[Key, str] = field(default_factory=dict)
    kept_from: int = 0
    forgotten: ForgottenKeys = field(default_factory=ForgottenKeys)
    trained_before: int = 0
    on_stale: OnStale = "drop"
    trained_from: dict[Key, int] = field(default_factory=dict)
    granted: dict[str, int] = field(default_factory=dict)
    _top: int = -1  # the highest step that was formed
    _planned_ever: int = 0  # groups of `steps`
    _untold: list[Key] = field(default_factory=list)  # evicted, and not taken by `take_evicted`

    @property
    def version(self) -> int:
        """The version of the weights that train."""
        return self.told[-1][1]

    @property
    def version_step(self) -> int:
        """The step that was next when `version` was told."""
        return self.told[-1][0]

    @property
    def timeline(self) -> int:
        """Number of the timeline that is trained."""
        return self.timelines[-1].number if self.timelines else 0

    @property
    def _bound(self) -> int | None:
        """Versions beyond which a group is not trained."""
        return None if self.on_stale == "train" else self.max_staleness

    @property
    def withholds(self) -> bool:
        """Whether a group is as old as its newest sequence: of those that are trained, the sequences that are too old are withheld."""
        return self.on_stale == "withhold"

    @property
    def has_begun(self) -> bool:
        """Tells whether a group was ever put."""
        return bool(self.versions or self.forgotten)

    def is_known(self, key: Key) -> bool:
        """Tells whether this group was ever put."""
        return key in self.versions or key in self.forgotten

    def load(
        self, steps: Mapping[int, list[Key]], kept_from: int, gone: set[Key], trained_from: Mapping[Key, int]
    ) -> None:
        """Take the memberships of an earlier process, and what it withheld; `gone`, and what is forgotten, never gets ready again."""
        self.kept_from = max(self.kept_from, kept_from)
        self.steps = {step: keys for step, keys in steps.items() if step >= self.kept_from}
        self.step_of = {key: step for step, keys in self.steps.items() for key in keys}
        self.trained_from = {key: version for key, version in trained_from.items() if key in self.step_of}
        self._top = max(self.steps, default=-1)
        self._planned_ever = sum(map(len, self.steps.values()))
        through = gone.union(*self.steps.values())
        for key in through:  # also one whose rows are lost: putting it again would train it twice
            self.versions.setdefault(key, self.newest)
        for key in [key for key in self.versions if key in self.forgotten]:  # of files that other groups need
            through.add(key)
            del self.versions[key]
        self.ready = [group for group in self.ready if group.key not in through]
        self.waiting = {key: version for key, version in self.waiting.items() if key not in through}
        self.owners = {key: owner for key, owner in self.owners.items() if key in self.waiting}

    def put(self, group: ReadyGroup, *, complete: bool = True, owner: str | None = None) -> bool:
        """Add a group; False when it was put before. One that is not complete waits; with an `owner` it is open."""
        self.reserved.pop(group.key[0], None)
        self.granted.pop(group.key[0], None)
        if self.is_known(group.key):
            return False
        self.versions[group.key] = group.version
        if complete:
            self.since.pop(group.key[0], None)
            self.ready.append(group)
        else:
            self.waiting[group.key] = group.version
            if owner is not None:
                self.owners[group.key] = owner
        return True

    def grow(self, key: Key, version: int) -> None:
        """An open group got rows of `version`: the oldest one counts, or the newest."""
        if key in self.waiting:
            counts = max if self.withholds else min
            self.versions[key] = self.waiting[key] = counts(version, self.waiting[key])

    def close(self, key: Key) -> None:
        """Nothing is added to its rows any more."""
        self.owners.pop(key, None)

    def complete(self, key: Key) -> None:
        """A group that was waiting may be planned."""
        if key in self.waiting:
            self.since.pop(key[0], None)
            self.ready.append(ReadyGroup(key, self.waiting.pop(key)))

    def refuse_version(self, version: int) -> str | None:
        """Says why no weights of this version can have sampled anything; None: they can. Without a bound all can."""
        limit = max(self.newest, self.version + max(0, self.reached - self.version_step)) + 1
        if self.max_staleness is None or version <= limit:
            return None
        return f"is of weight version {version}, and the newest that can be there is {limit}"

    def form(
        self,
        step: int,
        frontier: int,
        *,
        no_more_come: Callable[[], bool] = lambda: False,
        short_tail: bool = True,
    ) -> list[Key] | None:
        """The groups of `step`, planned now or before; None while there are not enough.

        Steps form in order: a step after one that is not formed waits for it.

        Args:
            no_more_come: whether a step makes do with what is ready, if that is anything at all; asked when what is too old has gone.
            short_tail: whether the last step may be short.
        """
        keys = self.steps.get(step)
        if keys is not None:
            return self._filled(step, keys, lambda: (short_tail or step < self._top) and no_more_come())
        assert step >= self.kept_from, "refused where it was asked for"
        if step > frontier and step - 1 not in self.steps:
            return None
        self.evict(self.trained_by(step))
        if len(self.ready) < self.batch_size:
            if not self.ready or not short_tail or not no_more_come():
                return None
        elif self._would_make_late(step):
            return None
        self.steps[step] = self._take(self.batch_size)
        self._choose(step, self.steps[step])
        self._top = max(self._top, step)
        self._planned_ever += len(self.steps[step])
        return self.steps[step]

    def trained_by(self, step: int) -> int:
        """The newest weight version that can train `step`."""
        return self.version + max(0, step - self.version_step)

    def is_stale(self, version: int, frontier: int) -> bool:
        """Tells whether a group of this version that comes now would be too old for the next step that can take it."""
        trained_by = self.trained_by(self._next_step(frontier))
        return self._bound is not None and trained_by - version > self._bound

    def set_version(self, version: int, frontier: int) -> list[Key]:
        """The weights that train are `version` from step `frontier` on; returns what became too old.

        Saying the same version again changes nothing.

        Raises:
            ValueError: it goes back, advances faster than one per step, or makes a planned step's groups too old.
        """
        if version < self.version:
            raise ValueError(f"{version} is below {self.version}")
        if version == self.version:
            return []
        for step in range(max(frontier, self.kept_from), self._top + 1):
            self._refuse_too_old(step, version + step - frontier, version)
        steps = max(1, frontier - self.version_step)
        started = self.has_begun or bool(self.steps)
        if self.max_staleness is not None and started and version - self.version > steps:
            raise ValueError(f"{version} is more than {steps} above {self.version}")
        self.told.append((frontier, version))
        self.newest = max(self.newest, version)
        self.reached = max(self.reached, frontier)
        return self.evict(self.trained_by(self._next_step(frontier)))

    def rewind(self, step: int, frontier: int) -> Timeline | None:
        """Go to `step`, all steps below `frontier` being committed; the new timeline when that is back."""
        reached = max(self.reached, frontier)
        self.reached = step
        if step >= reached:
            return None
        self.cut(step)
        self.timelines.append(Timeline(self.timeline + 1, step, self.version, reached))
        return self.timelines[-1]

    def cut(self, step: int) -> None:
        """The versions that were told after `step` was next are void."""
        self.told = [each for each in self.told if each[0] <= step] or [(step, self.told[0][1])]
        self.reached = step

    def evict(self, version: int) -> list[Key]:
        """Drop what is too old for weights of `version`."""
        if self._bound is None:
            return []
        oldest = version - self._bound
        old = [group.key for group in self.ready if group.version < oldest]
        may_get_newer = self.owners if self.withholds else {}
        old += [key for key, own in self.waiting.items() if own < oldest and key not in may_get_newer]
        self._remove(set(old))
        self.evicted += len(old)
        self._untold += old
        return old

    def take_evicted(self) -> list[Key]:
        """Returns what was evicted since this was asked last."""
        gone, self._untold = self._untold, []
        return gone

    def drop(self, uids: Iterable[str]) -> list[Key]:
        """A filter threw the groups of these prompts away that are in no step; returns what went."""
        wanted = set(uids)
        gone = [key for key in (*(group.key for group in self.ready), *self.waiting) if key[0] in wanted]
        self._remove(set(gone))
        return gone

    def drop_keys(self, keys: Iterable[Key]) -> None:
        """These groups, which are in no step, are not trained."""
        self._remove(set(keys))

    def quarantine(self, bad: Mapping[Key, str]) -> None:
        """These groups cannot be trained; their slots go by `on_bad_group` when the step is formed again."""
        self.quarantined.update(bad)
        self._remove(set(bad))

    def holes(self, step: int) -> list[int]:
        """Slots of a step that hold a quarantined group."""
        return [slot for slot, key in enumerate(self.steps.get(step, ())) if key in self.quarantined]

    def _to_fill(self, step: int) -> list[int]:
        """Slots of a formed step that wait for another group."""
        holes = self.holes(step)
        goes_on = self.on_bad_group == "shrink" and len(holes) < len(self.steps.get(step, ()))
        return [] if goes_on else holes

    def _slots(self, frontier: int) -> int:
        """Slots of the steps ahead that wait for another group; after a rewind there may be more of these steps than the bound allows."""
        return sum(len(self._to_fill(step)) for step in self._ahead(frontier))

    def _ahead(self, frontier: int) -> range:
        """Steps that may be formed and are not committed. Of a server that was killed `frontier` may be behind: what a version was told
        after is committed too."""
        return range(max(frontier, self.kept_from, self.reached), self._top + 1)

    def _next_step(self, frontier: int) -> int:
        """The step that takes the next group: the first one with a slot to fill, or the first that is not formed."""
        return next(
            (step for step in self._ahead(frontier) if self._to_fill(step)), max(frontier, self._top + 1)
        )

    def groups_below(self, step: int) -> list[Key]:
        """Groups of the steps below `step`."""
        return [key for number in range(self.kept_from, step) for key in self.steps.get(number, ())]

    def trained_below(self, step: int) -> int:
        """Counts the groups that the steps below `step` trained, those that were forgotten included."""
        return self.trained_before + sum(key not in self.quarantined for key in self.groups_below(step))

    def delete_before(self, step: int, gone: Collection[Key]) -> None:
        """Let go of the steps below `step`, and of the groups of `gone`."""
        old = [number for number in range(self.kept_from, step) if number in self.steps]
        self.trained_before = self.trained_below(step)
        self.kept_from = max(self.kept_from, step)
        base = max((number for number, (at, _) in enumerate(self.told) if at <= self.kept_from), default=0)
        self.told = self.told[base:]
        self._planned_ever -= sum(len(self.steps.pop(number)) for number in old)
        for key in gone:
            del self.versions[key]
            self.step_of.pop(key, None)
            self.trained_from.pop(key, None)
        self.forgotten.add(gone)

    def planned(self, frontier: int) -> int:
        """Groups of steps that are formed and not committed; a slot that waits for another group is room for it."""
        return sum(len(self.steps.get(step, ())) - len(self._to_fill(step)) for step in self._ahead(frontier))

    def trained(self, frontier: int) -> int:
        """Groups of committed steps, without those that could not be collated."""
        ahead = self._ahead(frontier)
        there = self._planned_ever - sum(len(self.steps.get(step, ())) for step in ahead)
        bad = sum(
            self.step_of[key] < ahead.start and key in self.steps.get(self.step_of[key], ())
            for key in self.quarantined
            if key in self.step_of
        )
        return self.trained_before + there - bad

    def capacity(self, frontier: int) -> int | None:
        """Returns how many groups may still be started; None if there is no bound."""
        if self.max_staleness is None:
            return None
        pending = len(self.ready) + len(self.waiting) + len(self.reserved)
        room = (self.max_staleness + 1) * self.batch_size - pending - self.planned(frontier)
        return max(0, room, self._slots(frontier) - pending)

    def reserve(
        self,
        uids: list[str],
        frontier: int,
        owner: str = "",
        until_s: float = FOREVER_S,
        *,
        attempt: int = 0,
        now_s: float = 0.0,
    ) -> dict[str, str]:
        """A verdict of each uid: `granted`, as many as there is capacity; `known`, its group was put under this attempt;
        `taken`, another producer works on it; `full`. Asking again changes nothing."""
        self.leases[owner] = until_s
        room = self.capacity(frontier)
        verdicts: dict[str, str] = {}
        for uid in dict.fromkeys(uids):
            if self.is_known((uid, attempt)):
                verdicts[uid] = "known"
            elif uid in self.reserved:
                verdicts[uid] = "granted" if self.reserved[uid] == owner else "taken"
            elif room == 0:
                verdicts[uid] = "full"
            else:
                room = None if room is None else room - 1
                verdicts[uid], self.reserved[uid], self.since[uid] = "granted", owner, now_s
        return verdicts

    def release(self, uids: Iterable[str]) -> None:
        """A producer gave up on these."""
        for uid in uids:
            if self.reserved.pop(uid, None) is not None:
                self.since.pop(uid, None)
                self.granted.pop(uid, None)

    def renew(self, owner: str, until_s: float) -> None:
        """A sign of life of a producer."""
        self.leases[owner] = until_s

    def expire(self, now_s: float) -> tuple[list[str], list[Key]]:
        """Give up what dead producers hold; returns their reservations and their open groups."""
        dead = {owner for owner, until_s in self.leases.items() if until_s < now_s}
        if not dead:
            return [], []
        for owner in dead:
            del self.leases[owner]
        uids = [uid for uid, owner in self.reserved.items() if owner in dead]
        keys = [key for key, owner in self.owners.items() if owner in dead]
        self.release(uids)
        self._remove(set(keys))
        return uids, keys

    def overdue(self, since_s: float) -> tuple[list[str], list[Key]]:
        """Give up what was reserved, or got its first row, before `since_s` and is not complete; returns as `expire`."""
        uids = [uid for uid in self.reserved if self.since.get(uid, since_s) < since_s]
        keys = [key for key in self.waiting if self.since.get(key[0], since_s) < since_s]
        self.release(uids)
        self._remove(set(keys))
        return uids, keys

    def may_grant(self, frontier: int) -> bool:
        """Tells whether a prompt that is sampled with the present weights can be trained in time. Weights that were not told yet may be
        newer: between a commit and `set_version` there is room for a step that the present ones are too old for."""
        if self.on_stale != "pace" or self._bound is None:
            return True
        steps = self.version + self._bound + 1 - self.trained_by(max(frontier, self._top + 1))
        pending = len(self.ready) + len(self.waiting) + len(self.reserved)
        return pending < self.batch_size * max(0, steps) + self._slots(frontier)

    def _would_make_late(self, step: int) -> bool:
        """Whether prompts that are under way would get too old if `step` were made of what is ready."""
        if self.on_stale != "pace" or self._bound is None:
            return False
        left = sorted(group.version for group in self.ready)[self.batch_size :]
        awaited = [
            *self.waiting.values(),
            *(self.granted[uid] for uid in self.reserved if uid in self.granted),
        ]
        trained_by = self.trained_by(step)
        for version in set(awaited):
            count = sum(each <= version for each in (*left, *awaited))
            if count > self.batch_size * max(0, version + self._bound - trained_by):
                return True
        return False

    def _filled(self, step: int, keys: list[Key], no_more_come: Callable[[], bool]) -> list[Key] | None:
        holes = self._to_fill(step)
        if not holes:
            return keys
        self.evict(self.trained_by(step))
        if len(self.ready) < len(holes):
            if not no_more_come():
                return None
            if not self.ready:  # a step without any group passes where another one follows it
                return keys if len(holes) < len(keys) or step < self._top else None
        fresh = dict(zip(holes, self._take(len(holes)), strict=False))
        self.steps[step] = [fresh.get(slot, key) for slot, key in enumerate(keys)]
        self._choose(step, fresh.values())
        return self.steps[step]

    def _choose(self, step: int, keys: Collection[Key]) -> None:
        self.step_of.update(dict.fromkeys(keys, step))
        if self.withholds and self._bound is not None:
            self.trained_from.update(dict.fromkeys(keys, self.trained_by(step) - self._bound))

    def _take(self, count: int) -> list[Key]:
        if self.on_stale == "pace":
            self.ready.sort(key=lambda group: group.version)
        taken, self.ready = self.ready[:count], self.ready[count:]
        return [group.key for group in taken]

    def _refuse_too_old(self, step: int, trained_by: int, version: int) -> None:
        versions = [self.versions[key] for key in self.steps.get(step, ()) if key in self.versions]
        if self._bound is None or not versions:
            return
        if (age := trained_by - min(versions)) > self._bound:
            raise ValueError(f"{version} would train step {step} with groups {age} versions old")

    def _remove(self, keys: set[Key]) -> None:
        if not keys:
            return
        self.ready = [group for group in self.ready if group.key not in keys]
        for key in keys:
            if self.waiting.pop(key, None) is not None:
                self.since.pop(key[0], None)
            self.owners.pop(key, None)
