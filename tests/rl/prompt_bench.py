"""A store of prompts with a clock of its own, which is killed at a write, and opened again from its folder at will."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raysvc.actors.rollouts.group_log import Spool
from raysvc.actors.rollouts.group_pool import Pool
from raysvc.actors.rollouts.group_store import GroupStore
from raysvc.actors.rollouts.prompts.prompt_book import position_of
from raysvc.actors.rollouts.prompts.prompt_desk import PromptRules
from raysvc.rl.group import Group
from raysvc.rl.group_table import table_of
from raysvc.rl.schema import Schema

TOTAL, TTL_S, LIMIT_S = 24, 10.0, 25.0


def uid_at(position: int) -> str | None:
    """Every seventh position is a hole, like a row that was dropped."""
    return None if position % 7 == 3 else f"{position}/0:0:{position % 8}"


class Source:
    """A stream of so many positions."""

    def __init__(self, total: int, uid_at: Callable[[int], str | None], identity: str = "one") -> None:
        self.total, self.uid_at, self.identity = total, uid_at, identity


class Died(Exception):
    """The server was killed."""


class MortalStore:
    """A store whose process is killed at a write: before it, or when it is done."""

    def __init__(self, store: Any) -> None:
        self._store, self.writes_left, self.is_done = store, -1, False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        return self._mortal(method) if name in ("write", "create", "delete") else method

    def _mortal(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def write(*args: Any, **kwargs: Any) -> Any:
            self.writes_left -= 1
            if self.writes_left == 0 and not self.is_done:
                raise Died
            result = method(*args, **kwargs)
            if self.writes_left == 0:
                raise Died
            return result

        return write


class Bench:
    """A store with a clock of its own, opened again from its folder at will."""

    def __init__(
        self,
        folder: Path,
        *,
        batch_size: int = 3,
        staleness: int | None = 1,
        ttl_s: float = TTL_S,
        late: tuple[str, ...] = (),
        drop_constant: str | None = None,
        short_tail: bool = True,
        **rules: Any,
    ) -> None:
        self.folder, self.now_s, self.frontier = folder, 0.0, 0
        self.batch_size, self.staleness, self.ttl_s = batch_size, staleness, ttl_s
        wanted = {
            "source": Source(TOTAL, uid_at),
            "on_stale": "pace",
            "max_prompt_s": LIMIT_S,
            "max_attempts": 3,
        }
        self.rules = PromptRules(**{**wanted, **rules})
        self.late, self.drop_constant, self.short_tail = late, drop_constant, short_tail
        self.forgotten: list[str] = []  # trained in steps that were forgotten
        self.asks: dict[str, int] = {}
        self.lives: dict[str, int] = {}
        self.open()

    def open(self) -> None:
        pool = Pool(self.batch_size, self.staleness, on_stale=self.rules.on_stale if self.rules else "drop")
        spool = Spool(str(self.folder), {})
        self.mortal = MortalStore(spool._store)
        spool._store = self.mortal  # type: ignore[assignment]
        self.store = GroupStore(
            pool,
            Schema(("input_ids",), self.late),
            spool,
            self.ttl_s,
            lambda: self.now_s,
            self.rules,
            self.drop_constant,
            self.short_tail,
        )

    @property
    def book(self) -> Any:
        return self.store.desk.book

    def call(self, what: Callable[[], Any]) -> Any:
        """As Ray calls a server that may be killed: what was not answered is asked again."""
        try:
            return what()
        except Died:
            self.open()
            return what()

    def ask(self, owner: str, count: int = 1) -> list[tuple[str, int]]:
        number = self.asks.get(owner, 0)
        self.asks[owner] = number + 1
        return self.ask_again(owner, number, count)

    def ask_again(self, owner: str, number: int, count: int = 1) -> list[tuple[str, int]]:
        """As Ray repeats a call."""
        life = f"{self.lives.get(owner, 0)}.{number}"
        told = self.call(lambda: self.store.hand_out(owner, life, count, self.frontier, is_first=number == 0))
        return [each[:2] for each in told]

    def restart(self, owner: str) -> None:
        """A producer of that name starts again."""
        self.lives[owner] = self.lives.get(owner, 0) + 1
        self.asks.pop(owner, None)

    def put(self, uid: str, attempt: int, owner: str, version: int | None = None) -> str:
        own = self.store.pool.version if version is None else version
        versions = [max(0, own - position_of(uid) % 3), own]  # the first sequence began earlier
        group = Group(
            uid, [[1, 2], [1, 3]], [[0, 1]] * 2, attempt=attempt,
            weight_version=versions if self.store.pool.withholds else own,
        )  # fmt: skip
        result = self.call(lambda: self.store.put(table_of([group]), owner, gate=self.frontier))
        # it waits while there is no capacity, which its prompt had until it was taken back
        assert result is not None or uid in self.book.back
        return "full" if result is None else result.verdicts[uid]

    def train(self) -> bool:
        """The next step, if it can be made."""
        if not self.call(lambda: self.store.form(self.frontier, self.frontier)):
            return False
        self.frontier += 1
        self.call(lambda: self.store.set_version(self.frontier, self.frontier))
        return True

    def rewind(self, step: int) -> None:
        self.call(lambda: self.store.rewind(step, self.frontier))
        self.frontier = step

    def forget(self, step: int) -> None:
        pool = self.store.pool
        below = [key for number, keys in pool.steps.items() if number < step for key in keys]
        gone = [key[0] for key in below if key not in pool.quarantined]
        self.call(lambda: self.store.delete_before(step))
        self.forgotten += gone

    def trained(self) -> list[str]:
        """Prompts of all steps; those of a step that was committed were trained."""
        pool = self.store.pool
        there = [key for keys in pool.steps.values() for key in keys if key not in pool.quarantined]
        return [*self.forgotten, *(uid for uid, _ in there)]

    def check(self) -> None:
        """Every prompt that was handed out is in one place."""
        pool, book = self.store.pool, self.book
        planned = Counter(self.trained())
        assert all(count == 1 for count in planned.values()), "a prompt was trained twice"
        kept = (
            Counter(planned)
            + Counter(group.key[0] for group in pool.ready)
            + Counter(uid for uid, _ in pool.waiting)
        )
        for position in range(book.next):
            if (uid := uid_at(position)) is None:
                continue
            places = [uid in book.out, uid in book.back, uid in book.lost, kept[uid] == 1]
            assert sum(places) == 1, (uid, places)
            assert kept[uid] <= 1
        assert set(book.out) == set(pool.reserved)
