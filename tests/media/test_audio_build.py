"""Builds of rows with audio: ids against the processor itself, every shape of source, and what is quarantined."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

import raysvc
from raysvc.cli.main import app
from raysvc.errors import ConfigError, SourceError
from raysvc.media.media_processor import MediaProcessor
from raysvc.media.medium import media_of

from .families import qwen, qwen_audio
from .rows import data_url, heard, jpeg, openai, wav
from .test_media_build import build

CLIP, OTHER = wav(8000), wav(20001, 300.0, channels=2)
ANSWER = {"role": "assistant", "content": "A tone."}
FEW = settings(max_examples=8, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen_audio(tmp_path_factory.mktemp("qwen_audio"))


def said(clips: list[bytes], text: str = "What is it?") -> dict[str, Any]:
    """A row as OpenAI's API has it."""
    parts: list[dict[str, Any]] = [
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(one).decode(), "format": "wav"}}
        for one in clips
    ]
    parts.insert(len(parts) // 2, {"type": "text", "text": text})
    return {"messages": [{"role": "user", "content": parts}, ANSWER]}


def truth(hf: Any, messages: list[dict[str, Any]], clips: list[bytes]) -> list[int]:
    """The ids of the processor itself, of samples that the standard library read."""
    whole = [
        {
            **one,
            "content": [{"type": "text", "text": one["content"]}]
            if isinstance(one["content"], str)
            else one["content"],
        }
        for one in messages
    ]
    text = hf.apply_chat_template(whole, tokenize=False)
    made = hf(text=[text], audio=[heard(one) for one in clips] or None, sampling_rate=16000)
    return list(made["input_ids"][0])


pieces = st.lists(
    st.one_of(st.text("abc .\n", min_size=1, max_size=8), st.integers(1000, 32000)), min_size=1, max_size=4
)


@FEW
@given(rows=st.lists(pieces, min_size=1, max_size=3))
def test_ids_are_those_of_the_processor_for_any_clips(
    tmp_path_factory: pytest.TempPathFactory, folder: Path, rows: list[Any]
) -> None:
    hf = MediaProcessor.load(str(folder)).hf
    plain, wanted = [], []
    for asked in rows:
        clips = [wav(one, 100.0 + one / 50) for one in asked if isinstance(one, int)]
        parts = [
            {"type": "audio"} if isinstance(one, int) else {"type": "text", "text": one} for one in asked
        ]
        left = iter(clips)
        named = [
            {"type": "audio", "audio": data_url(next(left))} if "text" not in one else one for one in parts
        ]
        plain.append({"messages": [{"role": "user", "content": named}, ANSWER]})
        wanted.append((truth(hf, [{"role": "user", "content": parts}, ANSWER], clips), clips))
    entry = build(tmp_path_factory.mktemp("any"), folder, plain, source={"media": True})
    assert entry.report["row_counts"]["quarantined"] == {}
    assert entry.report["verification"]["switched_to_the_reference"] == []
    token = hf.tokenizer.convert_tokens_to_ids("<|AUDIO|>")
    for row, (ids, clips) in enumerate(wanted):
        values = entry.row(row)
        assert values["input_ids"] == ids
        media = media_of(values["media"])
        assert [one.size for one in media] == [(len(heard(clip)), 16000) for clip in clips]
        assert sum(one.tokens for one in media) == values["media_tokens"] == ids.count(token)
        assert [one.at for one in media] == [
            n for n, one in enumerate(ids) if one == token and (n == 0 or ids[n - 1] != token)
        ]
        assert values["media_patches"] == len(clips)
        trained = [one for one, hit in zip(ids, values["loss_mask"], strict=True) if hit]
        assert hf.tokenizer.decode(trained) == "A tone.<|im_end|>"


def test_every_shape_of_source_gives_the_ids_of_the_same_row(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.wav").write_bytes(CLIP)
    absolute = tmp_path / "b.wav"
    absolute.write_bytes(OTHER)
    content = [{"type": "audio"}, {"type": "text", "text": "Both?"}, {"type": "audio"}]
    asked = {"role": "user", "content": "<audio>Both?<audio>"}
    paths = ["a.wav", str(absolute)]

    def parts(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
        both = [{"type": "audio", **first}, content[1], {"type": "audio", **second}]
        return {"messages": [{"role": "user", "content": both}, ANSWER]}

    shapes: dict[str, dict[str, Any]] = {
        "openai": said([CLIP, OTHER], "Both?"),
        "a url and a path": parts({"url": f"file://{tmp_path}/rows/a.wav"}, {"path": paths[1]}),
        "qwen's": parts({"audio_url": paths[0]}, {"audio": data_url(OTHER)}),
        "vllm's": parts({"type": "audio_url", "audio_url": {"url": data_url(CLIP)}}, {"audio": paths[1]}),
        "column": {"messages": [{"role": "user", "content": content}, ANSWER], "audios": paths},
        "placeholders": {"messages": [asked, ANSWER], "audio": paths},
        "sharegpt": {
            "conversations": [
                {"from": "human", "value": "<audio>Both?<audio>"},
                {"from": "gpt", "value": "A tone."},
            ],
            "audios": paths,
        },
        "alpaca": {"instruction": "<audio>Both?<audio>", "output": "A tone.", "audios": paths},
        "another name": {"messages": [asked, ANSWER], "clips": paths},
    }
    hf = MediaProcessor.load(str(folder)).hf
    wanted = truth(hf, [{"role": "user", "content": content}, ANSWER], [CLIP, OTHER])
    for name, row in shapes.items():
        source = {
            "columns": {"audios": "clips"} if "clips" in row else {},
            "media": {"allow": [str(tmp_path)]},
        }
        entry = build(tmp_path, folder, [row], source=source)
        assert entry.report["row_counts"]["quarantined"] == {}, name
        assert entry.row(0)["input_ids"] == wanted, name
    files = [p for p in (tmp_path / "cache" / ".media").rglob("*") if p.is_file()]
    assert sorted(p.read_bytes() for p in files) == sorted([CLIP, OTHER]), "one copy of each"


def test_the_audio_feature_of_datasets_is_read_from_its_parquet(tmp_path: Path, folder: Path) -> None:
    import datasets

    (tmp_path / "c.wav").write_bytes(OTHER)
    struct = datasets.Audio(decode=False).pa_type
    assert struct == pa.struct({"bytes": pa.binary(), "path": pa.string()})
    values = [[{"bytes": CLIP, "path": "gone.wav"}], [{"bytes": None, "path": "c.wav"}]]
    messages = [[{"role": "user", "content": "<audio>What?"}, ANSWER]] * 2
    pq.write_table(
        pa.table({"messages": messages, "audios": pa.array(values, pa.list_(struct))}),
        tmp_path / "rows.parquet",
    )
    entry = raysvc.tokenize(
        source={"path": str(tmp_path / "rows.parquet")},
        tokenizer=str(folder),
        cache={"root": str(tmp_path / "cache")},
    )
    sizes = [media_of(entry.row(row)["media"])[0].size for row in range(2)]
    assert sizes == [(8000, 16000), (20001, 16000)]


COUNT = "placeholders and audio clips do not match"
REFUSED = "the processor refuses the length of an audio clip"
BROKEN, UNKNOWN = "an audio clip is broken", "a medium is not audio that is read (WAV)"
BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "cut off": (said([CLIP[:-2]]), BROKEN, "it is cut off"),
    "no bytes": (said([b""]), "a data URL is broken", ""),
    "mp3": (said([b"ID3\x04" + bytes(90)]), UNKNOWN, "it is MP3; convert it: ffmpeg"),
    "a picture": (said([jpeg(40, 40)]), UNKNOWN, "begin like no sound"),
    "too long": (said([wav(32001)]), REFUSED, "2.00 s at 16000 Hz: the processor hears the first 2 s alone"),
    "another rate": (said([wav(8000, rate=44100)]), REFUSED, "the processor takes 16000 Hz: ffmpeg -i IN -ar 16000"),
    "too short": (said([wav(300)]), REFUSED, "it is too short"),
    "missing": ({"messages": [{"role": "user", "content": "<audio>?"}, ANSWER], "audios": ["no.wav"]},
                "an audio clip is missing", "no.wav"),
    "decoded": ({"messages": [{"role": "user", "content": "<audio>?"}, ANSWER], "audios": [{"array": [0.1]}]},
                "an audio clip is missing", ""),
    "fewer clips": ({"messages": [{"role": "user", "content": "<audio><audio>"}, ANSWER], "audios": [data_url(CLIP)]},
                    COUNT, "2 placeholders for 1 audio clips"),
    "the token": (said([CLIP], "What is <|AUDIO|>?"), "a text holds the token of audio clips", "<|AUDIO|>"),
    "an image": (openai([data_url(jpeg(40, 40))]), "a content part is not text", "image_url"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_row_with_bad_audio_is_quarantined_with_its_reason(name: str, tmp_path: Path, folder: Path) -> None:
    bad, reason, detail = BAD[name]
    entry = build(tmp_path, folder, [said([CLIP]), bad, said([CLIP])])
    assert entry.report["row_counts"]["quarantined"] == {reason: 1}
    assert detail in entry.report["examples"][0]["detail"]
    assert [entry.row(row)["source_row"] for row in entry.row_ids()] == [0, 2]


def test_an_empty_file_is_no_clip(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.wav").write_bytes(b"")
    row = {"messages": [{"role": "user", "content": "<audio>?"}, ANSWER], "audios": ["a.wav"]}
    entry = build(tmp_path, folder, [said([CLIP]), row])
    assert entry.report["row_counts"]["quarantined"] == {BROKEN: 1}
    assert "no bytes" in entry.report["examples"][0]["detail"]


def test_audio_without_a_processor_of_audio_is_refused_by_name(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    images = qwen(tmp_path / "qwen")
    column = {"messages": [{"role": "user", "content": "<audio>?"}, ANSWER], "audios": [data_url(CLIP)]}
    for tokenizer in (images, sample["tokenizer"]):
        with pytest.raises(SourceError, match=r"column 'audios'.*audio clips need a processor of theirs"):
            build(tmp_path, tokenizer, [column])
    with pytest.raises(ConfigError, match=r"source\.columns\.sounds"):
        build(tmp_path, images, [column], source={"columns": {"sounds": "audios"}})


def test_text_rows_of_a_model_of_audio_have_no_columns(tmp_path: Path, folder: Path) -> None:
    text = {"messages": [{"role": "user", "content": "an <audio> tag"}, ANSWER]}
    entry = build(tmp_path, folder, [text])
    assert "media" not in entry.row(0)
    assert (
        b"<audio>" in MediaProcessor.load(str(folder)).hf.tokenizer.decode(entry.row(0)["input_ids"]).encode()
    )


def test_show_names_a_clip_and_the_page_draws_its_waveform(tmp_path: Path, folder: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    quiet = wav(16000)[:44] + bytes(16000) + wav(16000)[16044:]  # silent, then loud
    rows.write_text(json.dumps(said([quiet])) + "\n")
    job = tmp_path / "job.yaml"
    job.write_text(
        yaml.safe_dump(
            {
                "source": {"path": str(rows)},
                "tokenizer": str(folder),
                "cache": {"root": str(tmp_path / "cache")},
            }
        )
    )
    runner = CliRunner()
    told = runner.invoke(app, ["show", "-c", str(job), "--row", "0", "--out", str(tmp_path / "row.html")])
    assert told.exit_code == 0, told.output
    page = (tmp_path / "row.html").read_text()
    assert "audio 1.00 s at 16000 Hz, " in page
    (picture,) = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', page)
    image = np.asarray(Image.open(io.BytesIO(base64.b64decode(picture))).convert("L"))
    assert image.shape == (40, 160)
    dark = (image < 128).mean(axis=0)
    assert dark[:75].max() == 0
    assert dark[85:].min() > 0.5
