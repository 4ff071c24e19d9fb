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
@pytest.mark.timeout(600)
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


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of Ray Data
def test_images_as_bytes_of_a_ray_dataset_are_those_of_files(tmp_path: Path, ray_session: None) -> None:
    import ray.data

    folder, lines, rows = idefics(tmp_path / "idefics"), [], []
    for number in range(40):
        name, picture = f"{number % 9}.jpg", jpeg(40 + 20 * (number % 9), 70, number % 9)
        (tmp_path / name).write_bytes(picture)
        chat = [
            {"role": "user", "content": f"<image>What is {number}?"},
            {"role": "assistant", "content": "A thing."},
        ]
        lines.append({"messages": chat, "images": [name]})
        rows.append({"messages": chat, "images": [{"bytes": picture, "path": None}]})
    made = {
        name: raysvc.tokenize(source=source, tokenizer=str(folder), cache={"root": str(tmp_path / name)})
        for name, source in (
            ("files", {"path": str(write_jsonl(tmp_path / "rows.jsonl", lines))}),
            ("ray", ray.data.from_items(rows, override_num_blocks=3)),
        )
    }
    assert made["ray"].num_rows == made["files"].num_rows == 40
    assert made["ray"].table().to_pylist() == made["files"].table().to_pylist()
    kept = [sorted(path.name for path in (tmp_path / name / FOLDER).glob("*/*")) for name in made]
    assert kept[0] == kept[1]
    row = [{**rows[0], "images": [{"bytes": b"no picture", "path": None}]}, *rows[1:]]
    broken = raysvc.tokenize(
        source={"ray": ray.data.from_items(row)}, tokenizer=str(folder), max_quarantine=0.5,
        cache={"root": str(tmp_path / "broken")},
    )  # fmt: skip
    assert sum(broken.report["row_counts"]["quarantined"].values()) == 1
