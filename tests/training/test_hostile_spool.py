"""Every kind of record of a server of rollouts, replaced by what would run, or cut: nothing runs, and the file is named."""

from __future__ import annotations

import logging
from pathlib import Path

import pyarrow as pa
import pytest

from raysvc.actors.rollouts.group_log import Forgotten, Spool

from .test_damaged_checkpoints import harms

SEEN_BY_CHANCE = ("missing", "longer", "bit")  # records carry no digest


def read_all(url: str) -> None:
    spool = Spool(url)
    spool.steps()
    spool.forgotten()
    for folder, name in spool.history():
        if folder == "events":
            spool.read_events(name)
            continue
        try:
            spool.read(name, folder)
        except pa.ArrowInvalid:  # who reads a spool logs its name: `GroupHistory`
            logging.getLogger("test").warning("%s/%s", folder, name)


@pytest.mark.parametrize("kind", ["groups", "columns", "events", "steps", "forgotten"])
def test_no_record_of_a_spool_runs_and_one_that_is_not_whole_is_named(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    url, marker = str(tmp_path / "spool"), tmp_path / "it-ran"
    spool = Spool(url)
    for folder in ("groups", "columns"):
        spool.put(pa.table({"n": list(range(100))}), folder)  # type: ignore[arg-type]
    spool.write_events([{"told": [[0, 1]]}])
    spool.write_step(1, [("a", 0)])
    spool.forget(Forgotten(1, {("b", 0): 3}, {}))
    (path,) = (tmp_path / "spool" / kind).iterdir()
    good = path.read_bytes()
    for what, bad in harms(good, marker, 2):
        path.unlink(missing_ok=True)
        if bad is not None:
            path.write_bytes(bad)
        caplog.clear()
        read_all(url)
        assert not marker.exists(), what
        assert what.startswith(SEEN_BY_CHANCE) or f"{kind}/{path.name}" in caplog.text, what
