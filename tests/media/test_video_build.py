"""Builds of rows with videos, and with images beside them: ids against the processor itself, masks, columns, faults."""

from __future__ import annotations

import base64
import hashlib
import io
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import raysvc
from raysvc.actors.server.entry_stream import EntryStream
from raysvc.actors.server.make_step import Recipe
from raysvc.actors.server.spec import SourceSpec
from raysvc.errors import ConfigError, EntryError, TokenizerError
from raysvc.job.config import PlanConfig
from raysvc.media.media_processor import MediaProcessor
from raysvc.media.medium import media_of
from raysvc.media.pixels import rgb
from raysvc.media.processor_spec import ProcessorSpec

from .families import llava, qwen
from .rows import data_url, jpeg, openai
from .test_media_build import build, check_mask
from .videos import mp4, oracle, seen

pytest.importorskip("av")
CLIP, OTHER = mp4(20), mp4(9, 56, 112, fps=6, seed=1)
PHOTO = jpeg(84, 56)
ANSWER = {"role": "assistant", "content": "A thing."}
FEW = settings(max_examples=6, suppress_health_check=list(HealthCheck))
BOTH = {"media": ["image", "video"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen(tmp_path_factory.mktemp("qwen"))


def url_of(data: bytes) -> str:
    return "data:video/mp4;base64," + base64.b64encode(data).decode()


def truth(folder: Path, parts: list[Any], answer: str = "A thing.") -> dict[str, Any]:
    """What the processor makes of a question of texts, images (JPEG) and videos, and its answer."""
    hf, content = oracle(folder), []
    images, videos = [], []
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        elif part[:2] == b"\xff\xd8":
            content.append({"type": "image"})
            images.append(rgb(part))
        else:
            content.append({"type": "video"})
            videos.append(seen(part))
    said = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": [{"type": "text", "text": answer}]},
    ]
    text = hf.tokenizer.apply_chat_template(said, tokenize=False)
    made = hf(text=[text], images=images or None, videos=videos or None, return_tensors="np")
    return {name: value[0] if name == "input_ids" else value for name, value in made.items()}


pieces = st.lists(
    st.one_of(
        st.text("abc .\n", min_size=1, max_size=8),
        st.tuples(st.integers(2, 5), st.integers(4, 24), st.sampled_from([2, 4, 8])),
        st.integers(2, 5),
    ),
    min_size=1,
    max_size=5,
)


@FEW
@given(rows=st.lists(pieces, min_size=1, max_size=2))
def test_ids_masks_and_pixels_are_those_of_the_processor_for_any_texts_images_and_videos(
    tmp_path_factory: pytest.TempPathFactory, folder: Path, rows: list[Any]
) -> None:
    tmp_path = tmp_path_factory.mktemp("any")
    plain, wanted = [], []
    for asked in rows:
        made = [
            one if isinstance(one, str)
            else jpeg(28 * one, 56) if isinstance(one, int)
            else mp4(one[1], 28 * one[0], 56, one[2])
            for one in asked
        ]  # fmt: skip
        parts = [
            {"type": "text", "text": one} if isinstance(one, str)
            else {"type": "image", "image": data_url(one)} if one[:2] == b"\xff\xd8"
            else {"type": "video_url", "video_url": {"url": url_of(one)}}
            for one in made
        ]  # fmt: skip
        plain.append({"messages": [{"role": "user", "content": parts}, ANSWER]})
        wanted.append((made, truth(folder, made)))
    entry = build(tmp_path, folder, plain, source=BOTH)
    assert entry.report["row_counts"]["quarantined"] == {}
    assert entry.report["verification"]["switched_to_the_reference"] == []
    stream = stream_of(entry, folder, len(rows))
    (shard,) = stream.make(0, (1,))[1]
    for row, (made, theirs) in enumerate(wanted):
        values = entry.row(row)
        assert values["input_ids"] == theirs["input_ids"].tolist()
        check_mask(values, oracle(folder), ["A thing."])
        media = media_of(values["media"])
        digests = [hashlib.sha256(one).hexdigest() for one in made if not isinstance(one, str)]
        assert [one.sha256 for one in media] == digests
        assert sum(one.tokens for one in media) == values["media_tokens"]
        assert values["media_patches"] == 4 * values["media_tokens"]
        place = shard.row_ids.tolist().index(row)
        for name in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
            if f"{name}_bounds" not in shard.arrays:
                assert name not in theirs
                continue
            a, b = shard.arrays[f"{name}_bounds"][place : place + 2]
            expected = theirs.get(name, shard.arrays[name][:0])
            np.testing.assert_allclose(shard.arrays[name][a:b], expected, rtol=0, atol=1e-6)


def stream_of(entry: Any, folder: Path, count: int) -> EntryStream:
    plan = PlanConfig(batch_size=count, shuffle="none", layout="padded_right", micro_batch_size=count)
    return EntryStream(
        [SourceSpec(uri=str(entry.uri))], {}, Recipe(plan, 0), processor=ProcessorSpec(name=str(folder))
    )


def test_every_shape_of_source_gives_the_ids_of_the_same_row(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.mp4").write_bytes(CLIP)
    absolute = tmp_path / "b.mp4"
    absolute.write_bytes(OTHER)
    content = [{"type": "video"}, {"type": "text", "text": "Both?"}, {"type": "video"}]
    asked = {"role": "user", "content": "<video>Both?<video>"}
    paths = ["a.mp4", str(absolute)]

    def parts(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
        both = [{"type": "video", **first}, content[1], {"type": "video", **second}]
        return {"messages": [{"role": "user", "content": both}, ANSWER]}

    shapes = {
        "qwen's": parts({"video": paths[0]}, {"video": f"file://{absolute}"}),
        "urls": parts({"type": "video_url", "video_url": {"url": url_of(CLIP)}}, {"url": url_of(OTHER)}),
        "column": {"messages": [{"role": "user", "content": content}, ANSWER], "videos": paths},
        "placeholders": {"messages": [asked, ANSWER], "videos": paths},
        "alpaca": {"instruction": "<video>Both?<video>", "output": "A thing.", "videos": paths},
    }
    wanted = truth(folder, [CLIP, "Both?", OTHER])["input_ids"].tolist()
    for name, row in shapes.items():
        entry = build(tmp_path, folder, [row], source={"media": {"allow": [str(tmp_path)]}})
        assert entry.report["row_counts"]["quarantined"] == {}, name
        assert entry.row(0)["input_ids"] == wanted, name
    files = [p for p in (tmp_path / "cache" / ".media").rglob("*") if p.is_file()]
    assert sorted(p.read_bytes() for p in files) == sorted([CLIP, OTHER]), "one copy of each"


def test_a_tar_of_videos_and_images_has_the_ids_of_the_same_row(tmp_path: Path, folder: Path) -> None:
    members = {
        "0.json": b'{"instruction": "<video>and<image>", "output": "A thing."}',
        "0.mp4": CLIP,
        "0.jpg": PHOTO,
    }
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    entry = raysvc.tokenize(
        source={"path": str(tmp_path / "a.tar")},
        tokenizer=str(folder),
        cache={"root": str(tmp_path / "cache")},
    )
    wanted = truth(folder, [CLIP, "and", PHOTO])["input_ids"].tolist()
    assert entry.row(0)["input_ids"] == wanted


def said(*videos: str) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "<video>" * len(videos)}, ANSWER],
        "videos": list(videos),
    }


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "cut off": (said(url_of(CLIP[:-300])), "a video is broken"),
    "a photo": (said(data_url(b"GIF89a, no video")), "a medium is not a video that is read"),
    "missing": (said("no/such.mp4"), "a video is missing"),
    "too long": (said(url_of(mp4(40))), "a video is too long"),
    "too large": (said(url_of(mp4(4, 280, 140))), "a video has too many pixels"),
    "one frame": (said(url_of(mp4(1))), "the processor refuses the size of a video"),
    "a ribbon": (said(url_of(mp4(4, 420, 2))), "the processor refuses the size of a video"),
    "more videos": (
        {**said(url_of(CLIP)), "videos": [url_of(CLIP)] * 2},
        "placeholders and videos do not match",
    ),
    "an image in its place": (
        {"messages": [{"role": "user", "content": "<image>"}, ANSWER], "videos": [url_of(CLIP)]},
        "placeholders and images do not match",
    ),
    "frames": (
        {"messages": [{"role": "user", "content": [{"type": "video", "video": ["a.jpg", "b.jpg"]}]}, ANSWER]},
        "a video is named in no way that is read",
    ),
    "an answer": (
        {
            "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<video>"}],
            "videos": [url_of(CLIP)],
        },
        "a trained message holds a video",
    ),
    "a token": (
        {"messages": [{"role": "user", "content": "<|video_pad|>"}, ANSWER]},
        "a text holds the token of videos",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_row_with_a_bad_video_is_quarantined_with_its_reason(
    name: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raysvc.media.video.MAX_FRAMES", 39)
    monkeypatch.setattr("raysvc.media.video.MAX_FRAME_PIXELS", 280 * 139)
    bad, reason = BAD[name]
    good = said(url_of(CLIP))
    entry = build(tmp_path, folder, [good, bad, good], source=BOTH)
    assert entry.report["row_counts"]["quarantined"] == {reason: 1}
    assert [entry.row(row)["source_row"] for row in entry.row_ids()] == [0, 2]


def test_max_length_never_cuts_through_a_video(tmp_path: Path, folder: Path) -> None:
    row = {
        "messages": [{"role": "user", "content": "<video>x<image>y"}, ANSWER],
        "videos": [url_of(CLIP)],
        "images": [data_url(PHOTO)],
    }
    whole = build(tmp_path, folder, [row], source=BOTH).row(0)
    first, second = media_of(whole["media"])
    options = {"truncation": "keep_start", "train_on": "all_tokens", "source": BOTH}
    inside = build(tmp_path, folder, [row, said()], max_length=first.at + first.tokens - 1, **options)
    assert inside.report["row_counts"]["dropped"] == {"max_length cuts through a video": 1}
    between = build(tmp_path, folder, [row], max_length=second.at, **options).row(0)
    assert [one.kind for one in media_of(between["media"])] == ["video"]


def test_rows_of_images_keep_their_key_and_say_how_videos_are_read(tmp_path: Path, folder: Path) -> None:
    """What is installed, and what the processor could do, changes no entry."""
    rows = [openai([data_url(PHOTO)]), said(url_of(CLIP))]
    entry = build(tmp_path, folder, rows)
    assert entry.report["row_counts"]["quarantined"] == {"column 'videos' is not used by format chat": 1}
    assert "source.media: [video]" in entry.report["examples"][0]["detail"]
    assert "videos" not in entry.entries[0].recipe["media"]["processor"]
    own = MediaProcessor.load(str(folder)).identity()
    with_videos = MediaProcessor.load(str(folder), kinds=["image", "video"]).identity()
    assert {name: with_videos[name] for name in own} == own
    assert with_videos["videos"]["temporal_patch_size"] == 2


def test_a_processor_without_videos_and_a_machine_without_a_decoder_say_what_to_do(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TokenizerError, match="takes no videos"):
        build(tmp_path, llava(tmp_path / "llava"), [said(url_of(CLIP))], source={"media": ["video"]})
    with pytest.raises(ConfigError, match=r"source\.media"):
        build(tmp_path, folder, [said(url_of(CLIP))], source={"media": ["smell"]})
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ConfigError, match=r"pip install 'raysvc\[video\]'"):
        build(tmp_path, folder, [said(url_of(CLIP))])


def test_the_picture_of_a_video_is_its_middle_frame(tmp_path: Path, folder: Path) -> None:
    from PIL import Image

    from raysvc.inspect.row_media import media_of_rows

    entry = build(tmp_path, folder, [said(url_of(CLIP))])
    ((shown,),) = media_of_rows(entry, [0]).values()
    assert "video 20 frames of 84 x 56 at 4 a second" in str(shown)
    picture = shown.picture()
    assert picture is not None
    assert Image.open(io.BytesIO(picture)).size == (84, 56)


def damaged_inside() -> bytes:
    """Its header and its first frame are whole."""
    data = bytearray(mp4(20))
    begin = data.index(b"mdat") + 4
    end = begin - 8 + int.from_bytes(data[begin - 8 : begin - 4])
    data[(begin + end) // 2 : end] = bytes(end - (begin + end) // 2)
    return bytes(data)


def test_a_video_that_is_damaged_inside_is_quarantined_where_it_is_compared(
    tmp_path: Path, folder: Path
) -> None:
    good, bad = said(url_of(CLIP)), said(url_of(damaged_inside()))
    entry = build(tmp_path, folder, [good, bad, bad, good], source=BOTH)
    assert entry.report["row_counts"]["quarantined"] == {"a video is broken": 2}
    assert sorted(one["source_row"] for one in entry.report["examples"]) == [1, 2]
    assert [entry.row(row)["source_row"] for row in entry.row_ids()] == [0, 3]


def test_a_video_that_is_damaged_inside_is_named_by_its_row_and_can_be_left_out(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raysvc.chat.slice_tokenizer.sampled_places", lambda flat, seed: [0])
    good = said(url_of(CLIP))
    entry = build(tmp_path, folder, [good, said(url_of(damaged_inside())), good], source=BOTH)
    assert entry.num_rows == 3
    with pytest.raises(
        EntryError, match=r"^row 1: media [0-9a-f]{64} cannot be decoded: .* add \[1\] to plan"
    ):
        stream_of(entry, folder, 3).make(0, (1,))
    plan = PlanConfig(batch_size=3, shuffle="none", micro_batch_size=3, skip_rows=(1,))
    stream = EntryStream(
        [SourceSpec(uri=str(entry.uri))], {}, Recipe(plan, 0), processor=ProcessorSpec(name=str(folder))
    )
    assert stream.make(0, (1,))[1][0].row_ids.tolist() == [0, 2]
