"""The parts of a server that need no Ray: shared steps, journal, spool, a server as a plain object."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from raysvc.actors.journal import Journal
from raysvc.actors.shared_steps import SharedSteps
from raysvc.actors.spool import Spool


def test_callers_of_one_key_wait_for_one_making_and_it_goes_when_all_have_taken_it() -> None:
    shared: SharedSteps[bytes] = SharedSteps(10**6)
    together = threading.Barrier(4)

    def take(_: int) -> bytes:
        together.wait()
        return shared.get("k", 4, lambda: b"x" * 100, len)

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(take, range(4))) == {b"x" * 100}
    assert (shared.made, shared.nbytes) == (1, 0)


def test_what_is_kept_fits_and_what_fell_out_is_made_again() -> None:
    shared: SharedSteps[bytes] = SharedSteps(250)
    for key in (0, 1, 2, 2, 1):
        assert shared.get(key, None, lambda key=key: bytes([key]) * 100, len) == bytes([key]) * 100  # type: ignore[misc]
        assert shared.nbytes <= 250
    assert shared.made == 3
    shared.get(0, None, lambda: b"0" * 100, len)
    assert shared.made == 4
    assert shared.get(9, None, lambda: b"9" * 1000, len) == b"9" * 1000
    assert shared.nbytes == 1000, "one larger step is kept alone"


def test_a_failure_is_not_kept() -> None:
    shared: SharedSteps[bytes] = SharedSteps(100)

    def fail() -> bytes:
        raise OSError("gone for a moment")

    with pytest.raises(OSError, match="for a moment"):
        shared.get("k", None, fail, len)
    assert shared.get("k", None, lambda: b"there", len) == b"there"


@pytest.mark.parametrize("protocol", ["", "memory://"])
def test_a_journal_gives_its_newest_whole_record(tmp_path: Path, protocol: str) -> None:
    url = f"{protocol}{tmp_path}/journal"
    assert Journal(url).load() is None
    journal = Journal(url)
    for number in range(3):
        journal.save({"number": number})
    assert Journal(url).load() == {"number": 2}
    if not protocol:
        (tmp_path / "journal" / "000000000009.json").write_text('{"number": 3, "half of')
        assert Journal(url).load() == {"number": 2}
        again = Journal(url)
        again.save({"number": 4})
        assert Journal(url).load() == {"number": 4}


def test_a_spool_gives_back_what_was_acknowledged_in_order_and_passes_over_a_torn_file(
    tmp_path: Path,
) -> None:
    spool = Spool(str(tmp_path / "groups"))
    assert spool.load() == []
    names = [spool.put(pa.table({"n": [number]})) for number in range(12)]
    (tmp_path / "groups" / "000000000012.torn.arrow").write_bytes(b"ARROW1\0\0 half of it")
    again = Spool(str(tmp_path / "groups"))
    assert [(name, table["n"].to_pylist()) for name, table in again.load()] == [
        (name, [number]) for number, name in enumerate(names)
    ]
    assert again.put(pa.table({"n": [13]})) > "000000000012.torn.arrow"
