"""Every kind of record of a server of rollouts, replaced by what would run, cut, or with a changed bit: nothing runs, and the file is named."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from raysvc.actors.rollouts.group_log import ForgottenGroups, Spool
from raysvc.actors.server.journal import Journal
from raysvc.cache.store.claim import Claim, Owner
from raysvc.cache.store.posix import PosixStore
from raysvc.errors import StoreError

from .test_damaged_checkpoints import harms

KINDS = ("groups", "columns", "events", "steps", "forgotten", "begins")


def written(url: str) -> None:
    claim = Claim(PosixStore(url), Owner("server", "s"))
    spool = Spool(url, {}, claim)
    spool.begin()
    for folder in ("groups", "columns"):
        spool.put(pa.table({"n": list(range(100))}), folder)  # type: ignore[arg-type]
    spool.write_events([{"told": [[0, 1]]}])
    spool.write_step(1, [("a", 0)])
    spool.forget(ForgottenGroups(1, {("b", 0): 3}, {}))
    claim.release()


def read_all(url: str) -> None:
    spool = Spool(url)
    spool.steps()
    spool.forgotten()
    for folder, name in spool.history():
        if folder == "events":
            spool.read_events(name)
        else:
            spool.read(name, folder)


@pytest.mark.parametrize("kind", KINDS)
def test_every_damage_of_a_record_of_a_spool_is_refused_by_name_and_nothing_runs(
    tmp_path: Path, kind: str
) -> None:
    url, marker = str(tmp_path / "spool"), tmp_path / "it-ran"
    written(url)
    assert sorted(path.name for path in Path(url).iterdir()) == sorted((*KINDS, "owners"))
    (path,) = (tmp_path / "spool" / kind).iterdir()
    good = path.read_bytes()
    for what, bad in harms(good, marker, len(good)):
        if bad is None:
            continue  # nothing says that a record was there
        path.unlink()
        path.write_bytes(bad)
        with pytest.raises(StoreError) as raised:
            read_all(url)
        assert raised.value.where == str(path), what
        assert "restore it" in raised.value.remedy
        assert not marker.exists(), what
    path.write_bytes(good)
    read_all(url)


def test_records_without_digests_of_an_earlier_version_are_read(tmp_path: Path) -> None:
    """Such a spool goes on; of its own records those that are not whole are passed over, as before."""
    url = str(tmp_path / "spool")
    written(url)
    steps = Spool(url).steps()
    assert list(steps[0]) == [1]
    with_digest = re.compile(r"-[0-9a-f]{16}(?=\.(arrow|json)$)")
    for path in list((tmp_path / "spool").rglob("*.*")):
        if path.is_file():
            path.rename(path.with_name(with_digest.sub("", path.name)))
    spool = Spool(url)
    (name,) = spool.names()
    assert re.fullmatch(r"\d{12}\.g1\.0t0e\.[0-9a-f]{8}\.arrow", name)
    assert spool.read(name)["n"].to_pylist() == list(range(100))
    assert spool.steps() == steps
    assert spool.forgotten() == ForgottenGroups(1, {("b", 0): 3}, {})


def test_what_is_put_after_the_owners_of_a_folder_were_removed_counts(tmp_path: Path) -> None:
    """Else their numbers begin again below those of `begins`, and records would seem to come from an owner that was replaced."""
    url = str(tmp_path / "spool")
    for life in range(5):
        if life == 3:
            shutil.rmtree(tmp_path / "spool" / "owners")
        claim = Claim(PosixStore(url), Owner("server", "s"))
        spool = Spool(url, {}, claim)
        spool.begin()
        assert len(spool.names()) == life
        spool.put(pa.table({"n": [life]}))
        assert len(spool.names()) == life + 1
        claim.release()
    assert claim._number == 5


def test_every_damage_of_a_journal_is_refused_by_name_and_a_whole_record_before_it_counts(
    tmp_path: Path,
) -> None:
    url, marker = str(tmp_path / "journal"), tmp_path / "it-ran"
    Journal(url).save(lambda: {"leases": {"": {"fence": 3, "age_s": 0.25}}, "plan_hash": "ab"})
    (path,) = Path(url).iterdir()
    good = path.read_bytes()
    for what, bad in harms(good, marker, len(good)):
        if bad is None:
            continue
        path.write_bytes(bad)
        with pytest.raises(StoreError) as raised:
            Journal(url).load()
        assert raised.value.where == str(path), what
        assert not marker.exists(), what
    path.write_bytes(good)
    (newer := path.with_name(f"{2:012d}.json")).write_bytes(good[:-9])
    whole = Journal(url).load()
    assert whole is not None
    assert whole["leases"] == {"": {"fence": 3, "age_s": 0.25}}
    newer.unlink()
    path.write_text('{"leases": {}}')
    assert Journal(url).load() == {"leases": {}}, "a record of an earlier version has no checksum"
