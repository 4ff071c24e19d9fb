"""Workers of a cluster make the entry that one process makes, and keep the same media."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import raysvc
from raysvc.media.media_store import FOLDER

from .families import idefics
from .rows import jpeg, openai, write_jsonl


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_workers_make_the_rows_of_one_process(tmp_path: Path, ray_session: None) -> None:
    folder, rows = idefics(tmp_path / "idefics"), []
    for number in range(24):
        name = f"{number % 9}.jpg"
        (tmp_path / name).write_bytes(jpeg(40 + 20 * (number % 9), 70, number % 9))
        rows.append(openai([name], f"What is {number}?"))
    source = {"path": str(write_jsonl(tmp_path / "rows.jsonl", rows))}
    made: dict[str, Any] = {}
    for name, workers in (("one", {"slice_mb": 0.002}), ("many", {"slice_mb": 0.002, "min": 2, "max": 2})):
        made[name] = raysvc.tokenize(
            source=source, tokenizer=str(folder), cache={"root": str(tmp_path / name)}, workers=workers
        )
    assert made["one"].key == made["many"].key
    assert len(made["many"].entries[0].manifest.parts) > 1
    assert made["one"].table().to_pylist() == made["many"].table().to_pylist()
    kept = [sorted(path.name for path in (tmp_path / name / FOLDER).glob("*/*")) for name in made]
    assert kept[0] == kept[1]
    assert len(kept[0]) == 9
