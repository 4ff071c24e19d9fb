"""Rows whose images cannot be used are quarantined, each with its reason, and never stop the others."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import raysvc
from raysvc.errors import QuarantineExceeded, UserMistake

from .families import CHATML, FAMILIES, qwen
from .rows import data_url, jpeg, openai, sharegpt, write_jsonl
from .test_media_build import build
from .test_pixels import bomb

PHOTO = jpeg(60, 44)
GOOD = openai([data_url(PHOTO)])
UNKNOWN = "a medium is not an image that is read (JPEG, PNG, WebP, GIF, BMP)"
COUNT = "placeholders and images do not match"
TWO = [data_url(PHOTO), data_url(PHOTO)]
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "cut off": (openai([data_url(PHOTO[:-90])]), "an image is broken"),
    "missing": (openai(["no/such/file.jpg"]), "an image is missing"),
    "a folder": (openai(["/tmp"]), "an image may not be named by a row"),
    "a device": (openai(["/dev/zero"]), "an image may not be named by a row"),
    "no server": (openai(["http://127.0.0.1:9/a.jpg"]), "an image may not be named by a row"),
    "a bomb": (openai([data_url(bomb(10_000, 10_000))]), "an image has too many pixels"),
    "no base64": (openai(["data:image/png;base64,***"]), "a data URL is broken"),
    "text": (openai([data_url(b"hello, I am no picture")]), UNKNOWN),
    "fewer images": (sharegpt([data_url(PHOTO)], "<image>and<image>"), COUNT),
    "more images": (sharegpt(TWO, "<image>alone"), COUNT),
    "none at all": (sharegpt([], "<image>What?"), COUNT),
    "a null": (sharegpt([None], "<image>What?"), "an image is missing"),  # type: ignore[list-item]
    "a number": (sharegpt([3], "<image>What?"), "an image is named in no way that is read"),  # type: ignore[list-item]
    "an answer": (sharegpt([data_url(PHOTO)], "Draw.", "<image>"), "a trained message holds an image"),
    "in an answer": (sharegpt([data_url(PHOTO)], "Draw.", "So: <image>"), "a trained message holds an image"),
    "a video": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "video", "video": "a.mp4"}]},
                {"role": "assistant", "content": "x"},
            ]
        },
        "a content part is not text",
    ),
    "a column of audio": ({**GOOD, "audios": ["a.wav"]}, "column 'audios' is not used by format chat"),
}


def as_chat(row: dict[str, Any]) -> dict[str, Any]:
    """A row with its turns as messages."""
    if "conversations" not in row:
        return row
    user, answer = (turn["value"] for turn in row["conversations"])
    messages = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "images": row["images"]}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(family, name, marks=[pytest.mark.slow] * (family != "qwen2_vl"))
        for family in sorted(FAMILIES)
        for name in BAD
    ],
    indirect=["family"],
)
def test_a_row_with_a_bad_image_is_quarantined_with_its_reason(
    name: str, tmp_path: Path, family: Path
) -> None:
    bad, reason = as_chat(BAD[name][0]), BAD[name][1]
    entry = build(tmp_path, family, [GOOD, bad, GOOD])
    assert entry.report["row_counts"]["quarantined"] == {reason: 1}
    assert [entry.row(row)["source_row"] for row in entry.row_ids()] == [0, 2]
    assert entry.report["examples"][0]["source_row"] == 1


def test_bad_images_side_by_side_are_quarantined_each_with_its_reason(tmp_path: Path, family: Path) -> None:
    rows = [each for bad, _ in BAD.values() for each in (GOOD, as_chat(bad))]
    entry = build(tmp_path, family, rows)
    assert entry.report["row_counts"]["quarantined"] == Counter(reason for _, reason in BAD.values())
    assert [entry.row(row)["source_row"] for row in entry.row_ids()] == list(range(0, len(rows), 2))


def test_a_size_that_the_processor_refuses_is_quarantined(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = qwen(tmp_path_factory.mktemp("qwen"))
    entry = build(tmp_path, folder, [GOOD, openai([data_url(jpeg(2000, 4))])])
    assert entry.report["row_counts"]["quarantined"] == {"the processor refuses the size of an image": 1}
    assert "aspect ratio" in entry.report["examples"][0]["detail"]


def test_the_token_of_images_in_a_text_is_refused(tmp_path: Path, family: Path) -> None:
    from raysvc.media.media_processor import MediaProcessor

    token = MediaProcessor.load(str(family)).tokens["image"]
    reason = COUNT if token == "<image>" else "a text holds the token of images"
    spoken = openai([data_url(PHOTO)], f"What does {token} mean?")
    text = {"messages": [{"role": "user", "content": f"a {token}"}, {"role": "assistant", "content": "b"}]}
    plain = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    entry = build(tmp_path, family, [GOOD, spoken, plain, plain, text, plain])
    assert entry.report["row_counts"]["quarantined"] == {reason: 2}


@pytest.mark.parametrize(
    ("shown", "detail"),
    [
        ("", "the template shows 0 of 1 images"),
        (
            "{% if message['role'] == 'assistant' %}<|image_pad|>{% endif %}",
            "the template shows an image of message 0 in message 1",
        ),
    ],
)
def test_a_template_that_shows_other_images_than_the_row_has_is_found_out(
    shown: str, detail: str, tmp_path: Path
) -> None:
    template = CHATML.replace("IMAGE", "").replace("<|im_end|>", f"{shown}<|im_end|>")
    rows = write_jsonl(tmp_path / "rows.jsonl", [GOOD])
    with pytest.raises(UserMistake, match=f"{COUNT}.*{detail}"):
        raysvc.tokenize(
            source={"path": str(rows)},
            tokenizer={"name": str(qwen(tmp_path / "qwen")), "chat_template": template},
            cache={"root": str(tmp_path / "cache")},
        )


def test_too_many_bad_images_end_the_build_with_the_path(tmp_path: Path, family: Path) -> None:
    with pytest.raises(QuarantineExceeded, match=r"an image is missing .*no/such/file\.jpg"):
        build(tmp_path, family, [GOOD, openai(["no/such/file.jpg"])], max_quarantine=0.1)
