"""One build per key and cluster: whoever asks second joins the build that runs.

The builder is a named actor, owned by the process that asked first. When that process dies, the actor
dies with it; the others start a new one, which goes on from the receipts in the store.

Always true:
- a slice is tokenized by one builder at a time, however many ask;
- every caller sees all receipts, those from before it joined too;
- an error of the build is raised in every caller, as it was raised in the builder;
- a builder that died counts once, however often it is found before the cluster knows.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from raysvc.cache.manifest import Receipt
from raysvc.errors import RaysvcError
from raysvc.nodes.objects import are_made

log = logging.getLogger(__name__)
NAMESPACE = "raysvc-builds"
POLL_S = 0.1
LOOK_S = 0.2  # the longest stay in a call of Ray
REPORT_S = 30.0  # a builder that does not answer is told of this often
# A builder needs no processor, and its node should last as long as the build: not one that may be taken away, nor one
# whose processors belong to trainers, where there are others.
PLACES: tuple[dict[str, str], ...] = (
    {"raysvc-pool": "!gpu", "ray.io/market-type": "!spot"},
    {"ray.io/market-type": "!spot"},
    {},
)
MAX_DEATHS = 20
FORGET_S = 60.0  # a cluster that is busy gives the name of a builder to the one that died, for seconds

Check = Callable[[], None]


@dataclass(frozen=True)
class SharedTask:
    """Holds what is left of a build, as it travels to the builder.

    Attributes:
        uri: of the entry that is built, or of the entries that are built together.
        num_slices: that are left.
        receipts: does it; the number of its entry and the receipt of every slice, in any order.
        cut: of the source into slices. Who cuts it otherwise has a builder of his own: receipts of this one are not his.
    """

    uri: str
    num_slices: int
    receipts: Callable[[], Iterator[tuple[int, Receipt]]]
    cut: str = ""


@dataclass(frozen=True)
class NewReceipts:
    """Holds what became known since a caller last asked.

    Attributes:
        receipts: of each new one the number of its entry, and its bytes.
        finished: nothing more will come.
    """

    receipts: tuple[tuple[int, bytes], ...]
    finished: bool


class Builder:
    """Runs one Ray Data graph in a thread, and tells what it made so far. Its calls never block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None  # guarded by self._lock
        self._receipts: list[tuple[int, bytes]] = []  # appended by the thread, read by `news`
        self._error: Exception | None = None
        self._finished = False
        self._entry, self._num_slices = "", 0

    def start(self, work: SharedTask) -> None:
        """Begin, unless somebody else's call has begun already."""
        with self._lock:
            if self._thread is None:
                self._entry, self._num_slices = work.uri, work.num_slices
                self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
                self._thread.start()

    def news(self, seen: int) -> NewReceipts:
        """Returns what came after the first `seen` receipts.

        Raises:
            RaysvcError: the build failed on something that a user can fix.
            RuntimeError: it failed otherwise.
        """
        finished = self._finished  # read before the list: nothing comes after it is set
        if self._error is not None:
            raise self._error
        return NewReceipts(tuple(self._receipts[seen:]), finished)

    def facts(self) -> dict[str, Any]:
        """Returns what it builds, slices that are done of all that were left, and its node."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        facts = {"entry": self._entry, "done": len(self._receipts), "slices": self._num_slices, "node": node}
        return {**facts, "finished": self._finished}

    def _run(self, work: SharedTask) -> None:
        try:
            for number, receipt in work.receipts():
                self._receipts.append((number, receipt.to_json()))
        except RaysvcError as error:
            self._error = error
        except Exception as error:
            log.exception("build failed entry=%s", work.uri)
            self._error = RuntimeError(f"the build of {work.uri} failed: {error}")
        self._finished = True


def builds_in_progress(timeout_s: float = 5.0) -> list[dict[str, Any]]:
    """`Builder.facts` of every build of the cluster that answers and is not finished."""
    import ray

    refs = []
    for found in ray.util.list_named_actors(all_namespaces=True):
        if found["namespace"] == NAMESPACE:
            try:
                refs.append(ray.get_actor(found["name"], namespace=NAMESPACE).facts.remote())
            except ValueError:
                continue  # it ended just now
    ready = ray.wait(refs, num_returns=len(refs), timeout=timeout_s)[0] if refs else []
    facts = []
    for ref in ready:
        try:
            facts.append(ray.get(ref))
        except ray.exceptions.RayError:
            continue
    return [each for each in facts if not each["finished"]]


def shared_receipts(work: SharedTask, check: Check = lambda: None) -> Iterator[tuple[int, Receipt]]:
    """Receipts of all slices with the numbers of their entries, made by this cluster's builder; in any order, maybe some twice.

    Args:
        work: what is left.
        check: is called between two looks at the builder; what it raises ends the wait, so that nobody who wants to leave
            Ray is left inside of a call.

    Raises:
        RaysvcError: what a task raised on purpose.
        RuntimeError: the build failed, or its builder died too often.
    """
    import ray

    deaths, died, since = 0, None, 0.0
    while deaths < MAX_DEATHS:
        try:
            check()
            yield from _follow(work, check)
        except ray.exceptions.RayActorError as error:
            if died is None or error.actor_id != died.actor_id:
                deaths, died, since = deaths + 1, error, time.monotonic()
                text = " ".join(str(error).split())
                log.warning("the builder of %s died; starting another one: %s", work.uri, text)
            elif time.monotonic() - since > FORGET_S:
                break
            time.sleep(POLL_S)
            continue
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        return
    remedy = (
        "look at the logs of Ray's workers: memory, or a setup hook of the runtime environment that fails"
    )
    many = "1 builder" if deaths == 1 else f"{deaths} builders"
    raise RuntimeError(f"{many} of {work.uri} died; {remedy}") from died


def _answer(ref: Any, uri: str, check: Check) -> NewReceipts:
    """Returns what a builder says, however late: a node that is busy or cut off for a while is no reason to end a build.

    Raises:
        RayActorError: Ray has found the builder dead.
    """
    import ray

    asked = told = time.monotonic()
    while True:
        if are_made(ref, LOOK_S):
            news: NewReceipts = ray.get(ref)
            return news
        check()
        if time.monotonic() - told > REPORT_S:
            told = time.monotonic()
            log.warning("waiting for the builder of %s since=%.0fs", uri, told - asked)


def _follow(work: SharedTask, check: Check) -> Iterator[tuple[int, Receipt]]:
    import ray

    name = hashlib.sha256(f"{work.uri}\n{work.cut}".encode()).hexdigest()[:24]
    actor = ray.remote(Builder).options(
        name=name,
        namespace=NAMESPACE,
        get_if_exists=True,
        num_cpus=0,
        label_selector=PLACES[0],
        fallback_strategy=[{"label_selector": place} for place in PLACES[1:]],
    )
    builder = actor.remote()
    builder.start.remote(work)
    seen = 0
    while True:
        news = _answer(builder.news.remote(seen), work.uri, check)
        for number, data in news.receipts:
            yield number, Receipt.from_json(data, "receipt")
        seen += len(news.receipts)
        if news.finished:
            return
        check()  # a builder that answers at once is asked for ever, and `_answer` checks only where one is late
        time.sleep(POLL_S)
