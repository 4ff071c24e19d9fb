"""`show`, its page and `replay` name the media of rows, and show them."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

import raysvc
from raysvc.cli.main import app
from raysvc.inspect.row_media import media_of_rows
from raysvc.job.job_file import load_job
from raysvc.media import decoding
from raysvc.media.pixels import rgb
from raysvc.report.pictures import MOST_PICTURES, gallery
from raysvc.row_ids import source_base

from .families import qwen
from .rows import data_url, jpeg, openai, write_jsonl

FIRST, SECOND = jpeg(60, 44), jpeg(300, 200, 1)
TEXT = {"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Ho."}]}
runner = CliRunner()


def run(*arguments: str) -> str:
    result = runner.invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen(tmp_path_factory.mktemp("qwen"))


@pytest.fixture
def job(tmp_path: Path, folder: Path) -> Path:
    rows = [openai([data_url(FIRST), data_url(SECOND)]), TEXT, openai([data_url(SECOND)])]
    sections: dict[str, Any] = {
        "source": {"path": str(write_jsonl(tmp_path / "rows.jsonl", rows))},
        "tokenizer": str(folder),
        "cache": {"root": str(tmp_path / "cache")},
        "plan": {"batch_size": 3, "shuffle": "none"},
        "trainer": {"run_dir": str(tmp_path / "run")},
    }
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_show_names_each_medium_of_a_row(job: Path) -> None:
    told = run("show", "-c", str(job), "--row", "0")
    lines = [line for line in told.splitlines() if re.match(r"\[\d\] image", line)]
    assert [line.startswith(f"[{n}] image") for n, line in enumerate(lines, start=1)] == [True, True]
    for line, data in zip(lines, (FIRST, SECOND), strict=True):
        width, height = Image.open(io.BytesIO(data)).size
        assert f"image {width} x {height}, " in line
        assert f"{len(data)} bytes, sha256 {digest(data)}, " in line
        assert Path(line.rpartition(", ")[2]).read_bytes() == data
    assert "image" not in run("show", "-c", str(job), "--row", "1")
    (medium,) = json.loads(run("show", "-c", str(job), "--row", "2", "--json"))["media"]
    assert (medium["sha256"], medium["width"], medium["height"]) == (digest(SECOND), 300, 200)
    assert Path(medium["path"]).read_bytes() == SECOND


def test_a_step_names_the_media_of_its_rows(job: Path) -> None:
    run("tokenize", "-c", str(job))
    rows = json.loads(run("show", "-c", str(job), "--step", "0", "--json"))["rows"]
    named = {
        row["row_id"]: [one["sha256"] for one in row.get("media", ())]
        for row in rows
        if row["row_id"] is not None
    }
    assert named == {"0:0:0": [digest(FIRST), digest(SECOND)], "0:0:1": [], "0:0:2": [digest(SECOND)]}
    run("show", "-c", str(job), "--step", "0", "--rows")


def test_the_page_holds_small_pictures_and_fetches_nothing(job: Path, tmp_path: Path) -> None:
    page = tmp_path / "row.html"
    run("show", "-c", str(job), "--row", "0", "--out", str(page))
    text = page.read_text()
    pictures = [base64.b64decode(one) for one in re.findall(r'src="data:image/jpeg;base64,([^"]+)"', text)]
    assert text.count("src=") == len(pictures) == 2
    for picture, data in zip(pictures, (FIRST, SECOND), strict=True):
        image, truth = Image.open(io.BytesIO(picture)), rgb(data)
        assert max(image.size) <= 160
        truth.thumbnail((160, 160))
        assert image.size == truth.size
        difference = np.abs(np.asarray(image.convert("RGB"), np.int16) - np.asarray(truth, np.int16))
        assert difference.mean() < 12, "it is this picture, as a JPEG has it"
    for one in (FIRST, SECOND):
        assert digest(one) in text


def test_the_report_shows_pictures_of_some_rows_and_why_others_have_none(job: Path, tmp_path: Path) -> None:
    sections = yaml.safe_load(job.read_text())
    rows = [openai([data_url(FIRST)]), TEXT, openai([data_url(SECOND)]), openai([data_url(SECOND[:-40])])]
    write_jsonl(Path(sections["source"]["path"]), rows)
    job.write_text(yaml.safe_dump({**sections, "max_quarantine": 1.0}))
    page = tmp_path / "report.html"
    run("report", "-c", str(job), "--out", str(page))
    text = page.read_text()
    pictures = re.findall(r'<img alt="" src="data:image/jpeg;base64,([^"]+)"><figcaption>row ([\d:]+):', text)
    assert [row for _, row in pictures] == ["0:0:0", "0:0:2"]
    sizes = [Image.open(io.BytesIO(base64.b64decode(data))).size for data, _ in pictures]
    assert sizes == [(60, 44), (160, 107)]
    assert "2 of 2 media of 2 sampled rows" in text
    (aside,) = json.loads(
        zlib.decompress(base64.b64decode(text.partition('id="table">')[2].partition("<")[0]))
    )["aside"]
    assert (aside["shown"], aside["why"], aside["detail"][:12]) == ("3", "an image is broken", "it is cut of")
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)
    assert policy is not None
    assert policy[1].endswith("; img-src data:")


def test_a_gallery_has_no_more_pictures_than_its_bound() -> None:
    class Shown:
        def __str__(self) -> str:
            return "<b>"

        def picture(self) -> bytes:
            return b"x" * 100

    page = gallery({row: [Shown()] * 3 for row in range(20)})  # type: ignore[list-item]
    assert page.count("<figure>") == MOST_PICTURES == 24
    assert "24 of 60 media of 20 sampled rows" in page
    assert "<b>" not in page
    assert gallery({}) == ""
    assert "row 1:0:5: " in gallery({source_base(1) + 5: [Shown()]})  # type: ignore[list-item]


def test_a_medium_that_is_gone_is_shown_without_a_picture(job: Path, tmp_path: Path) -> None:
    run("show", "-c", str(job), "--row", "2")
    (tmp_path / "cache" / ".media" / digest(SECOND)[:2] / digest(SECOND)).unlink()
    page = tmp_path / "row.html"
    run("show", "-c", str(job), "--row", "2", "--out", str(page))
    assert "no picture: it cannot be decoded here" in page.read_text()
    assert digest(SECOND) in page.read_text()


def test_replay_names_the_digests_of_each_shard(job: Path) -> None:
    run("show", "-c", str(job), "--row", "0")
    told = json.loads(run("replay", "-c", str(job), "--step", "0", "--json"))
    wanted = [digest(FIRST), digest(SECOND), digest(SECOND)]
    assert sorted(one for shard in told["shards"] for one in shard["media"]) == sorted(wanted)
    text = run("replay", "-c", str(job), "--step", "0")
    assert sorted(re.findall(r"medium ([0-9a-f]{64})", text)) == sorted(wanted)


def test_a_mixture_of_text_and_images_keeps_the_media_of_its_rows(tmp_path: Path, folder: Path) -> None:
    sources = {
        "text": {"source": {"path": str(write_jsonl(tmp_path / "text.jsonl", [TEXT] * 2))}, "weight": 1},
        "seen": {
            "source": {"path": str(write_jsonl(tmp_path / "seen.jsonl", [openai([data_url(FIRST)])] * 2))},
            "weight": 1,
        },
    }
    for order in (("text", "seen"), ("seen", "text")):
        entry = raysvc.tokenize(
            mixture={"sources": {name: sources[name] for name in order}},
            tokenizer=str(folder),
            cache={"root": str(tmp_path / "cache")},
        )
        rows = entry.rows.read(entry.row_ids()).rows
        with_media = [text is not None and digest(FIRST) in text for text in rows["media"].tolist()]
        assert with_media == [order[row // 2] == "seen" for row in range(4)]
        assert [tokens > 0 for tokens in rows["media_tokens"].tolist()] == with_media


def test_pictures_are_drawn_within_the_budget_of_decoding(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("tokenize", "-c", str(job))
    entry = raysvc.tokenize(load_job(job))
    row = int(entry.row_ids()[0])
    (first, _) = media_of_rows(entry, [row])[row]
    assert first.picture()
    monkeypatch.setattr(decoding, "_budget", decoding.Budget(1000))
    assert first.picture() is None
