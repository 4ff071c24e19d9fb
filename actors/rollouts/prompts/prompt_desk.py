"""Hands out prompts and takes them back, and says what becomes of each. Called under the lock of the store.

Always true:
- what the book learns is told to the log in the same breath: a restart knows as much;
- a put counts if its prompt is handed out, or waits to be handed out again, and its attempt is the last that was handed out;
- without a stream of prompts nothing is known and nothing is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from raysvc.actors.rollouts.group_log import Event
from raysvc.actors.rollouts.group_pool import Key, Pool
from raysvc.actors.rollouts.prompts.prompt_book import PromptAttempt, PromptBook, position_of
from raysvc.actors.rollouts.prompts.prompt_source import PromptSource
from raysvc.errors import ConfigError, SourceError


class PromptRules(NamedTuple):
    """The stream, and what is done about prompts that come to nothing; as of `PromptSpec`."""

    source: PromptSource
    on_stale: str
    max_prompt_s: float | None
    max_attempts: int


class PromptDesk:
    """See the module.

    Args:
        rules: None: producers bring prompts of their own.
        pool: of the groups.
        tell: appends an event to the log.

    Attributes:
        book: what was handed out.
    """

    def __init__(self, rules: PromptRules | None, pool: Pool, tell: Callable[[Event], int]) -> None:
        self._rules, self._pool, self._tell = rules, pool, tell
        self.book = PromptBook(1 if rules is None else rules.max_attempts)

    def begin(self) -> None:
        """Know the stream by its identity from now on.

        Raises:
            ConfigError: prompts of another stream were handed out before, or producers brought their own.
        """
        mine = "" if self._rules is None else self._rules.source.identity
        if mine and not self.book.stream and (self._pool.has_begun or self._pool.reserved):
            what = "are given, and producers brought prompts of their own to this run folder"
            raise ConfigError("serve_rollouts(prompts)", what, "take another run_dir")
        if self.book.stream not in ("", mine):
            what = (
                "are others than those that were handed out from this run folder"
                if mine
                else "are not given, and this run folder has handed out prompts of a job"
            )
            remedy = "give the same job with the same plan again, or take another run_dir"
            raise ConfigError("serve_rollouts(prompts)", what, remedy)
        if mine != self.book.stream:
            self.book.stream = mine
            self._tell({"stream": mine})

    @property
    def max_prompt_s(self) -> float | None:
        """Says how long a producer may have a prompt; None: as long as it lives."""
        return None if self._rules is None else self._rules.max_prompt_s

    @property
    def is_ended(self) -> bool:
        """Tells whether there was a stream, and nothing of it is left to hand out or under way."""
        book = self.book
        return (
            self._rules is not None and book.next >= self._rules.source.total and not (book.back or book.out)
        )

    def refuses(self, key: Key) -> bool:
        """Tells whether a put of rows that were never put comes from an attempt that does not count any more.

        Raises:
            SourceError: nobody was handed this prompt.
        """
        uid, attempt = key
        if self._rules is None:
            return False
        newest = self.book.attempts.get(uid, 0)
        if uid in self.book.out or uid in self.book.back:
            return attempt != newest
        if uid in self.book.lost or self._pool.is_known((uid, newest)):
            return True
        what = "is no prompt that this server handed out"
        raise SourceError(f"group {uid!r}", what, "put groups of producer.prompts()")

    def hand_out(
        self, owner: str, ask: str, count: int, frontier: int, is_first: bool, until_s: float, now_s: float
    ) -> list[PromptAttempt]:
        """Up to `count` prompts for a producer; see `GroupStore.hand_out`.

        Args:
            until_s: when its reservations end without a sign of life.
            now_s: clock value.
        """
        mine = [uid for uid in self.book.out if self._pool.reserved.get(uid) == owner]
        answered = self.book.asks.get(owner, {})
        if ask in answered:
            uids = [uid for uid in answered[ask] if uid in mine]
        elif is_first and mine:
            uids = mine
        else:
            uids = self._new(owner, ask, count, frontier, until_s, now_s)
        return [self.book.out[uid] for uid in uids]

    def give_back(self, uids: Iterable[str], reason: str) -> None:
        """Nothing comes of these attempts: the prompts are handed out again, or are lost."""
        known = [] if self._rules is None else [uid for uid in uids if uid not in self.book.lost]
        if known:
            self.book.give_back(known, reason)
            self._tell({"given_back": [known, reason]})

    def lose(self, uids: Iterable[str], reason: str) -> None:
        """These prompts are never trained."""
        known = [] if self._rules is None else list(uids)
        if known:
            self.book.lose(known, reason)
            self._tell({"lost": [known, reason]})

    def too_old(self, keys: Iterable[Key]) -> None:
        """The groups of these attempts are too old to be trained."""
        uids = [uid for uid, _ in keys]
        if self._rules is not None and uids:
            if held := [uid for uid in uids if uid in self._pool.reserved]:
                self._pool.release(held)
                self._tell({"released": held})
            (self.lose if self._rules.on_stale == "drop" else self.give_back)(uids, "stale")

    def _new(
        self, owner: str, ask: str, count: int, frontier: int, until_s: float, now_s: float
    ) -> list[str]:
        assert self._rules is not None, "asked of a server of prompts"
        book, pool, source = self.book, self._pool, self._rules.source
        following, handed = book.next, list[PromptAttempt]()
        again = sorted(book.back.items(), key=lambda each: position_of(each[0]))
        while len(handed) < count and (again or following < source.total):
            is_new = not again
            uid, attempt = (source.uid_at(following), 0) if is_new else again.pop(0)
            if uid is not None:
                if not pool.may_grant(frontier):
                    break
                said = pool.reserve([uid], frontier, owner, until_s, attempt=attempt, now_s=now_s)
                if said[uid] != "granted":
                    break
                pool.granted[uid] = pool.version
                handed.append(PromptAttempt(uid, attempt, pool.version))
            following += is_new
        if handed or following > book.next:
            book.hand_out(owner, ask, handed, following)
            self._tell({"handed_out": [owner, ask, [list(each) for each in handed], following]})
        return [each.uid for each in handed]
