"""What a server keeps, under two processes that both believe the run folder is theirs: the second half of `raysvc.cache.store.claim`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raysvc.actors.mesh import Mesh
from raysvc.actors.rollouts.group_log import Spool
from raysvc.actors.server.journal import Journal
from raysvc.actors.server.kept.served_records import ServedRecords
from raysvc.actors.server.lease_store import LeaseStore
from raysvc.actors.server.leases import Leases
from raysvc.actors.server.spec import ServeSpec
from raysvc.cache.store.claim import Claim, Owner
from raysvc.cache.store.open import open_store
from raysvc.errors import FolderLost
from raysvc.feedback.decision import Decision
from raysvc.feedback.feedback_log import FeedbackLog
from raysvc.feedback.request import RowOutcomes
from raysvc.job.config import PlanConfig

DECISION = Decision("x", 3, None, (), (1, 2), {})


class Folder:
    """A server's folder, and claims on it by processes of as many machines."""

    def __init__(self, url: str, options: dict[str, Any], stack: ExitStack) -> None:
        self.url, self.options, self._stack = url, options, stack

    def claim(self, name: str) -> Claim:
        owner = Owner("server", name, "raysvc", name, "one cluster", place=name)
        claim = Claim(open_store(self.url, self.options), owner, is_served=lambda _: False)
        self._stack.callback(claim.release)
        return claim

    def opened(self, kind: Callable[..., Any], below: str, claim: Claim | None = None) -> Any:
        return kind(f"{self.url}{below}", self.options, claim)


@pytest.fixture(params=["posix", "memory", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
    with ExitStack() as stack:
        if request.param == "s3":
            server = request.getfixturevalue("s3_server")
            yield Folder(f"s3://raysvc-tests/{tmp_path.name}-{os.getpid()}/server", server.options, stack)
        else:
            prefix = "memory://" if request.param == "memory" else ""
            yield Folder(f"{prefix}{tmp_path}/server", {}, stack)


def test_a_journal_refuses_a_process_that_slept_and_its_successor_goes_on(folder: Folder) -> None:
    old = folder.opened(Journal, "", folder.claim("old"))
    old.save(lambda: {"by": "old", "n": 1})
    new = folder.opened(Journal, "", folder.claim("new"))
    assert new.load() == {"by": "old", "n": 1}
    for _ in range(2):
        with pytest.raises(FolderLost, match=r"server 'old'.*belongs to server 'new'"):
            old.save(lambda: {"by": "old", "n": 2})
    assert folder.opened(Journal, "").load() == {"by": "old", "n": 1}
    for number in range(2, 5):
        new.save(lambda number=number: {"by": "new", "n": number})
        with pytest.raises(FolderLost):
            old.save(lambda: {"by": "old", "n": 2})
        assert folder.opened(Journal, "").load() == {"by": "new", "n": number}


def test_a_record_that_comes_out_of_the_network_late_is_never_written_over_nor_believed(
    folder: Folder,
) -> None:
    old = folder.opened(Journal, "", folder.claim("old"))
    old.save(lambda: {"n": 1})
    new = folder.opened(Journal, "", folder.claim("new"))
    assert new.load() == {"n": 1}
    late = open_store(folder.url, folder.options)
    assert late.create("000000000002.json", b'{"n": "late"}')
    new.save(lambda: {"n": 2})
    assert folder.opened(Journal, "").load() == {"n": 2}
    new.save(lambda: {"n": 3})
    assert [name for name in late.list() if name.endswith(".json")] == ["000000000004.json"]


def test_leases_of_a_server_that_slept_refuse_everybody(folder: Folder) -> None:
    old = LeaseStore(Leases("s"), 30.0, "old", folder.opened(Journal, "", folder.claim("old")))
    fence = old.attach("", "rows", "a", "a", 0, Mesh(1), False, 3).fence
    new = LeaseStore(Leases("s"), 30.0, "new", folder.opened(Journal, "", folder.claim("new")))
    assert new.attach("", "rows", "b", "b", 0, Mesh(1), False, 3).fence == fence + 1
    old.commit(fence, 7, 0, moves=0, skipped=False)  # in memory alone, until the journal is asked
    for call in (
        old.flush,
        lambda: old.beat(fence, 0),
        lambda: old.check(fence),
        lambda: old.move(fence, 3, 0, moves=None),
        lambda: old.detach(fence, 0),
        lambda: old.attach("", "rows", "c", "c", 0, Mesh(1), True, 3),
    ):
        with pytest.raises(FolderLost):
            call()
    record = folder.opened(Journal, "").load()
    assert (record["leases"][""]["fence"], record["leases"][""]["frontier"]) == (fence + 1, 0)


def test_decisions_and_outcomes_of_a_server_that_slept_are_refused(folder: Folder) -> None:
    old, new = (folder.opened(FeedbackLog, "/feedback", folder.claim(name)) for name in ("old", "new"))
    assert old.add(0, DECISION)
    assert new.decisions() == [DECISION]
    outcomes = RowOutcomes(np.arange(3), np.arange(3), {"loss": np.zeros(3, np.float32)})
    with pytest.raises(FolderLost):
        old.add(1, DECISION)
    with pytest.raises(FolderLost):
        old.report(outcomes, 1)
    assert new.decisions() == [DECISION]
    assert len(new.outcomes(0, 3, [DECISION]).steps) == 0
    new.report(outcomes, 1)
    assert len(new.outcomes(0, 3, [DECISION]).steps) == 3


def test_how_steps_were_made_is_written_by_the_owner_alone_and_never_over_another(folder: Folder) -> None:
    spec = ServeSpec(name="s", sources=(), plan=PlanConfig(), pad_token_id=0, journal=folder.url)
    other = spec.model_copy(update={"pad_token_id": 9})
    old, new = folder.claim("old"), folder.claim("new")
    ServedRecords(folder.url, folder.options, old).keep(0, spec)
    ServedRecords(folder.url, folder.options, new).keep(4, other)
    with pytest.raises(FolderLost):
        ServedRecords(folder.url, folder.options, old).keep(0, spec)
    lines = ServedRecords(folder.url, folder.options).lines()
    assert [(line["step"], line["spec"]["pad_token_id"]) for line in lines] == [(0, 0), (4, 9)]


def table(number: int) -> pa.Table:
    return pa.table({"n": [number]})


def test_records_of_a_spool_that_come_late_do_not_count_after_any_number_of_restarts(folder: Folder) -> None:
    spools = [folder.opened(Spool, "/rollouts", folder.claim(f"p{number}")) for number in range(3)]
    for spool in spools[:1]:
        spool.begin()
    names = [spools[0].put(table(number)) for number in range(3)]
    spools[0].write_step(0, [("a", 0)])
    late = folder.opened(Spool, "/rollouts")._store
    spools[1].begin()
    names.append(spools[1].put(table(3)))
    late.write("groups/000000000004.g1.ffffffff.arrow", b"of the first owner, written after the second began")
    late.write("events/000000000005.g1.ffffffff.json", b'[{"dropped": [["a", 0]]}]')
    late.write("steps/000000000000.000000000006.g1.ffffffff.json", b'{"step": 0, "groups": [["b", 0]]}')
    with pytest.raises(FolderLost):
        spools[0].put(table(9))
    with pytest.raises(FolderLost):
        spools[0].write_step(0, [("c", 0)])
    for spool in (spools[1], spools[2], folder.opened(Spool, "/rollouts")):
        if spool is spools[2]:
            spool.begin()
        assert spool.names() == names
        assert [folder for folder, _ in spool.history()] == ["groups"] * len(names)
        assert spool.steps() == ({0: [("a", 0)]}, {})
    spools[2].write_step(0, [("d", 0)])
    assert folder.opened(Spool, "/rollouts").steps() == ({0: [("d", 0)]}, {}), (
        "the last record of a step counts"
    )
