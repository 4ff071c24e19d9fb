"""Rows with an image and a sound: ids, masks, lengths and arrays against Qwen2.5-Omni's own processor."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysvc.actors.server.entry_stream import EntryStream
from raysvc.actors.server.make_step import Recipe
from raysvc.actors.server.spec import SourceSpec
from raysvc.errors import TokenizerError
from raysvc.job.config import PlanConfig
from raysvc.media.media_processor import MediaProcessor
from raysvc.media.medium import media_of
from raysvc.media.pixels import rgb
from raysvc.media.processor_spec import ProcessorSpec

from .families import qwen_omni
from .rows import data_url, heard, jpeg, wav
from .test_media_build import build, check_mask
from .videos import mp4

ANSWER = "A thing."
ARRAYS = ("pixel_values", "image_grid_thw", "input_features", "feature_attention_mask")


def mixed(count: int) -> list[list[Any]]:
    """Texts, images and sounds in any order, up to five of them in a row; the first row has all."""
    rng, rows = np.random.default_rng(0), [["a", jpeg(60, 44), wav(9000)]]
    for _ in range(count - 1):
        makers = [
            lambda: "".join(rng.choice([*"abc .\n"], int(rng.integers(1, 9)))),
            lambda: jpeg(*rng.integers(28, 140, 2).tolist()),
            lambda: wav(int(rng.integers(2000, 32000)), float(rng.integers(100, 4000))),
        ]
        rows.append([makers[kind]() for kind in rng.integers(0, 3, int(rng.integers(1, 6))).tolist()])
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen_omni(tmp_path_factory.mktemp("qwen_omni"))


def truth(hf: Any, parts: list[Any]) -> dict[str, Any]:
    """What the processor makes of texts, images (JPEG) and sounds (WAV), and of the answer."""
    content = [
        {"type": "text", "text": one} if isinstance(one, str) else {"type": kind_of(one)} for one in parts
    ]
    said = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": [{"type": "text", "text": ANSWER}]},
    ]
    text = hf.apply_chat_template(said, tokenize=False)
    images = [rgb(one) for one in parts if kind_of(one) == "image"]
    sounds = [heard(one) for one in parts if kind_of(one) == "audio"]
    made = hf(text=[text], images=images or None, audio=sounds or None, return_tensors="np")
    return {name: value[0] if name == "input_ids" else value for name, value in made.items()}


def kind_of(part: Any) -> str:
    return "text" if isinstance(part, str) else "audio" if part[:4] == b"RIFF" else "image"


def row_of(parts: list[Any]) -> dict[str, Any]:
    content = [
        {"type": "text", "text": one}
        if isinstance(one, str)
        else {"type": f"{kind_of(one)}_url", f"{kind_of(one)}_url": {"url": data_url(one)}}
        for one in parts
    ]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": ANSWER}]}


def test_rows_of_images_and_sounds_are_those_of_the_processor(tmp_path: Path, folder: Path) -> None:
    made = mixed(12)
    together = [{kind_of(one) for one in row} >= {"image", "audio"} for row in made]
    assert any(together[1:])
    assert not all(together)
    hf = MediaProcessor.load(str(folder), kinds=["image", "audio"]).hf
    entry = build(tmp_path, folder, [row_of(one) for one in made])
    assert entry.report["row_counts"]["quarantined"] == {}
    assert entry.report["verification"]["switched_to_the_reference"] == []
    plan = PlanConfig(batch_size=len(made), shuffle="none", layout="packed", micro_batch_tokens=4096)
    stream = EntryStream(
        [SourceSpec(uri=str(entry.uri))], {}, Recipe(plan, 0), processor=ProcessorSpec(name=str(folder))
    )
    _, (shard,) = stream.make(0, (1,))
    for row, parts in enumerate(made):
        theirs, values = truth(hf, parts), entry.row(row)
        assert values["input_ids"] == theirs["input_ids"].tolist()
        check_mask(values, hf, [ANSWER])
        media = media_of(values["media"])
        assert [one.sha256 for one in media] == [
            hashlib.sha256(one).hexdigest() for one in parts if not isinstance(one, str)
        ]
        assert [one.kind for one in media] == [kind_of(one) for one in parts if not isinstance(one, str)]
        assert sum(one.tokens for one in media) == values["media_tokens"]
        place = shard.row_ids.tolist().index(row)
        assert shard.arrays["seq_lengths"][place] == len(theirs["input_ids"]), "the plan's length is exact"
        for name in ARRAYS:
            a, b = shard.arrays[f"{name}_bounds"][place : place + 2]
            np.testing.assert_array_equal(shard.arrays[name][a:b], theirs.get(name, shard.arrays[name][:0]))


def test_a_row_may_have_both_where_the_first_row_shows_both(tmp_path: Path, folder: Path) -> None:
    photo, tone = jpeg(84, 56), wav(9000)
    rows = [row_of([photo, "What?", tone]), row_of(["Nothing."]), row_of([tone]), row_of([photo])]
    entry = build(tmp_path, folder, rows)
    kinds = [[one.kind for one in media_of(entry.row(row)["media"])] for row in range(4)]
    assert kinds == [["image", "audio"], [], ["audio"], ["image"]]


def test_a_video_with_a_sound_is_refused_before_the_build(tmp_path: Path, folder: Path) -> None:
    """Qwen2.5-Omni would put the sound of a video between its frames, and count its positions in seconds."""
    clip, tone, photo = mp4(8, 56, 56), wav(9000), jpeg(84, 56)
    parts = {"video": clip, "audio": tone, "image": photo}
    content = [{"type": f"{kind}_url", f"{kind}_url": {"url": data_url(one)}} for kind, one in parts.items()]
    both = {
        "messages": [
            {"role": "user", "content": content[:2]},
            {"role": "assistant", "content": ANSWER},
        ]
    }
    what = "source: the first row has a video, and of the processor Qwen2_5OmniProcessor images and audio clips are used; see"
    with pytest.raises(TokenizerError, match=what):
        build(tmp_path, folder, [both, row_of([photo])])
    assert not list((tmp_path / "cache").glob("*/*")), "nothing was built"
    with pytest.raises(TokenizerError, match=r"Qwen2_5OmniProcessor.* takes no videos"):
        build(tmp_path, folder, [both], source={"media": ["audio", "video"]})
    rows = [both, row_of([photo]), row_of([photo, tone])]
    entry = build(tmp_path, folder, rows, source={"media": ["image", "audio"]})
    assert entry.report["row_counts"]["quarantined"] == {"a content part is not text": 1}
    assert "source.media: [video]" in entry.report["examples"][0]["detail"]


def test_the_placeholders_of_one_kind_meet_no_medium_of_the_other(tmp_path: Path, folder: Path) -> None:
    good = {
        "messages": [{"role": "user", "content": "<image>?<audio>"}, {"role": "assistant", "content": ANSWER}]
    }
    good |= {"images": [data_url(jpeg(84, 56))], "audios": [data_url(wav(9000))]}
    swapped = {**good, "images": good["audios"], "audios": good["images"]}
    without = {**good, "audios": []}
    twice = {**good, "images": good["images"] * 2}
    entry = build(tmp_path, folder, [good, swapped, without, twice])
    assert entry.num_rows == 1
    assert sum(entry.report["row_counts"]["quarantined"].values()) == 3
    assert entry.report["row_counts"]["quarantined"]["placeholders and audio clips do not match"] == 1
    assert entry.report["row_counts"]["quarantined"]["placeholders and images do not match"] == 1
