"""Decoding shares a budget of memory: rows wait for each other, and one that can never fit is refused by name."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raysvc.chat.row_errors import RowFault
from raysvc.media import decoding
from raysvc.media.decoding import Budget, all_decoded, memory_of

from .families import qwen
from .rows import data_url, jpeg, openai
from .test_media_build import build


def image(width: int, height: int) -> Any:
    return SimpleNamespace(kind="image", size=(width, height), sha256="x")


def test_rows_that_are_decoded_at_once_stay_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    one, photo = image(60, 44), jpeg(60, 44)
    monkeypatch.setattr(decoding, "_budget", Budget(2 * memory_of([one])))
    guard, at_once, most = threading.Lock(), 0, 0
    two = threading.Barrier(2)

    def work() -> None:
        nonlocal at_once, most
        with all_decoded([one], lambda _: photo):
            with guard:
                at_once += 1
                most = max(most, at_once)
            two.wait(60)
            time.sleep(0.02)  # for a third one, if it may
            with guard:
                at_once -= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 2


def test_what_a_row_took_is_given_back_when_it_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    one = image(60, 44)
    monkeypatch.setattr(decoding, "_budget", Budget(memory_of([one])))
    for _ in range(3):
        with pytest.raises(RowFault, match="broken"), all_decoded([one], lambda _: jpeg(60, 44)[:-200]):
            pass


def test_the_largest_image_fits_and_some_of_them_in_a_row_do_not() -> None:
    """8000 x 8000 took 732 MB, measured as the peak of a process."""
    assert 700e6 < memory_of([image(8000, 8000)]) < decoding.BUDGET_BYTES
    assert memory_of([image(2480, 3508)] * 16) < decoding.BUDGET_BYTES, "a document of 16 pages"
    with pytest.raises(RowFault, match="12 media take"):
        decoding.check_decodable([image(8000, 8000)] * 12)


def test_a_row_whose_media_never_fit_is_quarantined_when_it_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photo = data_url(jpeg(60, 44))
    monkeypatch.setattr(decoding, "_budget", Budget(memory_of([image(60, 44)] * 2)))
    entry = build(
        tmp_path, qwen(tmp_path / "qwen"), [openai([photo]), openai([photo] * 3), openai([photo] * 2)]
    )
    assert entry.report["row_counts"]["quarantined"] == {decoding.TOO_MUCH: 1}
