"""Builds of rows with images: ids against the processor itself, masks, columns, and every shape of source."""

from __future__ import annotations

import hashlib
import io
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.image_utils import load_image

import raysvc
from raysvc.cache.store.open import open_store
from raysvc.errors import ConfigError, SourceError, TokenizerError
from raysvc.media.media_processor import MediaProcessor
from raysvc.media.media_store import read_medium
from raysvc.media.medium import COLUMNS, media_of

from .families import FAMILIES
from .rows import data_url, jpeg, openai, sharegpt, write_jsonl

PHOTO, OTHER = jpeg(60, 44), jpeg(90, 200, 1)
FEW = settings(max_examples=6, suppress_health_check=list(HealthCheck))


def build(tmp_path: Path, folder: Path | str, rows: list[dict[str, Any]], **options: Any) -> Any:
    """An entry of rows in a file of its own."""
    name = hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:8]
    source = {
        "path": str(write_jsonl(tmp_path / "rows" / f"{name}.jsonl", rows)),
        **options.pop("source", {}),
    }
    given = {"max_quarantine": 1.0, **options}
    return raysvc.tokenize(
        source=source, tokenizer=str(folder), cache={"root": str(tmp_path / "cache")}, **given
    )


def truth(processor: Any, messages: list[dict[str, Any]], images: list[bytes]) -> list[int]:
    """The ids of the processor itself: its template, its tokens, its own look at the pixels."""
    whole = [
        {
            **one,
            "content": [{"type": "text", "text": one["content"]}]
            if isinstance(one["content"], str)
            else one["content"],
        }
        for one in messages
    ]
    text = processor.tokenizer.apply_chat_template(
        whole, tokenize=False, chat_template=template_of(processor)
    )
    seen = [load_image(Image.open(io.BytesIO(data))) for data in images]
    return list(processor(text=[text], images=seen or None)["input_ids"][0])


def template_of(processor: Any) -> str:
    return str(processor.chat_template or processor.tokenizer.chat_template)


words = st.text("abc xyz.\n", min_size=1, max_size=12).filter(lambda text: bool(text.strip()))
sizes = st.tuples(st.integers(30, 260), st.integers(30, 260))
turns = st.lists(
    st.tuples(st.lists(st.one_of(words, sizes), min_size=1, max_size=4), words.map(str.strip)),
    min_size=1,
    max_size=3,
)


@FEW
@given(rows=st.lists(turns, min_size=1, max_size=3))
def test_ids_are_those_of_the_processor_for_any_messages_and_sizes(
    tmp_path_factory: pytest.TempPathFactory, family: Path, rows: list[Any]
) -> None:
    hf = MediaProcessor.load(str(family)).hf
    plain, wanted = [], []
    for number, conversation in enumerate(rows):
        messages: list[dict[str, Any]] = []
        theirs: list[dict[str, Any]] = []
        images: list[bytes] = []
        for asked, answer in conversation:
            parts, seen = [], []
            for one in asked:
                if isinstance(one, str):
                    parts.append({"type": "text", "text": one})
                    seen.append(parts[-1])
                else:
                    images.append(jpeg(*one, seed=number + len(images)))
                    parts.append({"type": "image_url", "image_url": {"url": data_url(images[-1])}})
                    seen.append({"type": "image"})
            for held, content in ((messages, parts), (theirs, seen)):
                held += [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
        plain.append({"messages": messages})
        wanted.append((theirs, images, [answer for _, answer in conversation]))
    entry = build(tmp_path_factory.mktemp("any"), family, plain, source={"media": True})
    assert entry.report["row_counts"]["quarantined"] == {}
    assert entry.num_rows == len(rows)
    assert entry.report["verification"]["switched_to_the_reference"] == []
    for row, (theirs, images, answers) in enumerate(wanted):
        values = entry.row(row)
        assert values["input_ids"] == truth(hf, theirs, images)
        check_mask(values, hf, answers)
        check_media(values, hf, images, entry.uri)


def check_mask(values: dict[str, Any], hf: Any, answers: list[str]) -> None:
    """What is trained are the answers with their ends, whatever lies between."""
    trained = [token for token, hit in zip(values["input_ids"], values["loss_mask"], strict=True) if hit]
    end = hf.tokenizer.eos_token
    assert hf.tokenizer.decode(trained) == "".join(answer + end for answer in answers)


def check_media(values: dict[str, Any], hf: Any, images: list[bytes], uri: str) -> None:
    """The columns, by the raw bytes and by the processor's own count."""
    media = media_of(values["media"])
    assert [one.sha256 for one in media] == [hashlib.sha256(data).hexdigest() for data in images]
    token = hf.tokenizer.convert_tokens_to_ids(hf.image_token)
    places = np.flatnonzero(np.array(values["input_ids"]) == token).tolist()
    counts = [
        hf(text=[hf.image_token], images=[Image.open(io.BytesIO(data))])["input_ids"][0].count(token)
        for data in images
    ]
    assert [one.tokens for one in media] == counts
    assert sum(counts) == len(places) == values["media_tokens"]
    assert [one.at for one in media] == [places[sum(counts[:n])] for n in range(len(counts))]
    assert [one.size for one in media] == [Image.open(io.BytesIO(data)).size for data in images]
    assert values["media_patches"] == sum(one.patches for one in media)
    store = open_store(uri.rpartition("/")[0])
    assert [read_medium(store, one.sha256) for one in media] == images


def test_every_shape_of_source_gives_the_ids_of_the_same_row(tmp_path: Path, family: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "pictures").mkdir()
    (folder / "pictures" / "a.jpg").write_bytes(PHOTO)
    absolute = tmp_path / "b.png"
    absolute.write_bytes(OTHER)
    urls = [data_url(PHOTO), data_url(OTHER)]
    hf_parts = [{"type": "image"}, {"type": "text", "text": "Both?"}, {"type": "image"}]
    answer = {"role": "assistant", "content": "Yes."}
    paths = ["pictures/a.jpg", str(absolute)]
    shapes: dict[str, dict[str, Any]] = {
        "openai": openai(urls, "Both?", "Yes."),
        "file url": openai(["pictures/a.jpg", f"file://{absolute}"], "Both?", "Yes."),
        "parts with paths": {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "path": paths[0]},
                        {"type": "text", "text": "Both?"},
                        {"type": "image", "image": urls[1]},
                    ],
                },
                answer,
            ]
        },
        "column": {"messages": [{"role": "user", "content": hf_parts}, answer], "images": paths},
        "sharegpt": sharegpt(paths, "<image>Both?<image>", "Yes."),
        "alpaca": {"instruction": "<image>Both?<image>", "output": "Yes.", "images": paths},
        "question": {"question": "<image>Both?<image>", "answer": "Yes.", "images": paths},
    }
    hf = MediaProcessor.load(str(family)).hf
    wanted = truth(hf, [{"role": "user", "content": hf_parts}, answer], [PHOTO, OTHER])
    for name, row in shapes.items():
        entry = build(tmp_path, family, [row], source={"media": {"allow": [str(tmp_path)]}})
        assert entry.report["row_counts"]["quarantined"] == {}, name
        assert entry.row(0)["input_ids"] == wanted, name
    files = [p for p in (tmp_path / "cache" / ".media").rglob("*") if p.is_file()]
    assert sorted(p.read_bytes() for p in files) == sorted([PHOTO, OTHER]), "one copy of each"


def test_images_in_parquet_are_those_of_json_lines(tmp_path: Path, family: Path) -> None:
    messages = [[{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "It."}]]
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    (tmp_path / "c.jpg").write_bytes(OTHER)
    for image_of, data in (
        ({"bytes": PHOTO, "path": "gone.jpg"}, PHOTO),
        ({"bytes": None, "path": "c.jpg"}, OTHER),
    ):
        table = pa.table({"messages": messages, "images": pa.array([[image_of]], pa.list_(image))})
        pq.write_table(table, tmp_path / "rows.parquet")
        options: dict[str, Any] = {"tokenizer": str(family), "cache": {"root": str(tmp_path / "cache")}}
        entry = raysvc.tokenize(source={"path": str(tmp_path / "rows.parquet")}, **options)
        same = build(tmp_path, family, [sharegpt([data_url(data)], "<image>What?", "It.")])
        assert entry.row(0)["input_ids"] == same.row(0)["input_ids"]
        assert entry.row(0)["media"] == same.row(0)["media"]


def test_a_datasets_folder_with_image_features_is_read(tmp_path: Path, family: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "messages": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
            "images": [datasets.Image()],
        }
    )
    row = {
        "messages": sharegpt([], "<image>What?", "It.")["conversations"],
        "images": [Image.open(io.BytesIO(PHOTO))],
    }
    row["messages"] = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "It."}]
    datasets.Dataset.from_list([row], features=features).save_to_disk(tmp_path / "saved")
    entry = raysvc.tokenize(
        source={"path": str(tmp_path / "saved")},
        tokenizer=str(family),
        cache={"root": str(tmp_path / "cache")},
    )
    (medium,) = media_of(entry.row(0)["media"])
    assert medium.size == Image.open(io.BytesIO(PHOTO)).size


def test_both_answers_of_a_pair_see_the_image(tmp_path: Path, family: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "<image>Which?"}], "images": [data_url(PHOTO)]}
    for side, text in (("chosen", "This."), ("rejected", "That!")):
        row[side] = [{"role": "assistant", "content": text}]
    entry = build(tmp_path, family, [row])
    hf = MediaProcessor.load(str(family)).hf
    user = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]}
    for number, text in enumerate(("This.", "That!")):
        values = entry.row(number)
        assert values["input_ids"] == truth(hf, [user, {"role": "assistant", "content": text}], [PHOTO])
        assert [one.sha256 for one in media_of(values["media"])] == [hashlib.sha256(PHOTO).hexdigest()]


def test_each_turn_has_the_images_that_came_before_it(tmp_path: Path, family: Path) -> None:
    said: list[dict[str, Any]] = []
    for url, answer in ((data_url(PHOTO), "One."), (data_url(OTHER), "Two.")):
        said += openai([url], "And this?", answer)["messages"]
    entry = build(tmp_path, family, [{"messages": said}], train_on="each_assistant_turn")
    digests = [hashlib.sha256(data).hexdigest() for data in (PHOTO, OTHER)]
    found = [[one.sha256 for one in media_of(entry.row(row)["media"])] for row in entry.row_ids()]
    assert found == [digests[:1], digests]


def test_all_tokens_never_trains_what_stands_for_an_image(tmp_path: Path, family: Path) -> None:
    hf = MediaProcessor.load(str(family)).hf
    row = sharegpt([data_url(PHOTO)], "See <image> there.", "Yes.")
    values = build(tmp_path, family, [row], train_on="all_tokens").row(0)
    trained = [token for token, hit in zip(values["input_ids"], values["loss_mask"], strict=True) if hit]
    assert hf.tokenizer.convert_tokens_to_ids(hf.image_token) not in trained
    assert {"See", "there.", "Yes."} <= {
        word for word in ("See", "there.", "Yes.") if word in hf.tokenizer.decode(trained)
    }


def test_an_upright_image_and_its_colours_decide_tokens(tmp_path: Path, family: Path) -> None:
    hf = MediaProcessor.load(str(family)).hf
    rows, images = [], []
    for orientation in (1, 3, 6, 8):
        exif, out = Image.Exif(), io.BytesIO()
        exif[0x0112] = orientation
        Image.open(io.BytesIO(jpeg(200, 60))).save(out, "JPEG", exif=exif.tobytes())
        images.append(out.getvalue())
    for mode in ("L", "LA", "P", "RGBA", "1"):
        out = io.BytesIO()
        Image.open(io.BytesIO(jpeg(80, 120))).convert("RGBA" if mode == "LA" else "RGB").convert(mode).save(
            out, "PNG"
        )
        images.append(out.getvalue())
    out = io.BytesIO()
    Image.open(io.BytesIO(jpeg(80, 120))).convert("CMYK").save(out, "JPEG")
    images.append(out.getvalue())
    rows = [openai([data_url(data)], "What?", "It.") for data in images]
    entry = build(tmp_path, family, rows)
    content = [{"type": "image"}, {"type": "text", "text": "What?"}]
    if rows[0]["messages"][0]["content"][0]["type"] == "text":
        content.reverse()
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "It."}]
    for row, data in enumerate(images):
        assert entry.row(row)["input_ids"] == truth(hf, messages, [data]), row
    upright = [one.size for row in range(4) for one in media_of(entry.row(row)["media"])]
    assert upright == [(200, 60), (200, 60), (60, 200), (60, 200)]


def test_text_rows_between_rows_with_images_are_the_processors_too(tmp_path: Path, family: Path) -> None:
    hf = MediaProcessor.load(str(family)).hf
    text = {"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Ho."}]}
    rows = [openai([data_url(PHOTO)]), *[text] * 40, openai([data_url(OTHER)])]
    entry = build(tmp_path, family, rows)
    assert entry.num_rows == 42
    assert entry.row(7)["input_ids"] == entry.row(40)["input_ids"] == truth_of_text(hf, text["messages"])
    assert [entry.row(n)["media"] is None for n in (0, 7, 41)] == [False, True, False]
    assert entry.entries[0].row_values("media_tokens")[[7, 40]].tolist() == [0, 0]


def truth_of_text(hf: Any, messages: list[dict[str, Any]]) -> list[int]:
    parts = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in messages]
    text = hf.tokenizer.apply_chat_template(parts, tokenize=False, chat_template=template_of(hf))
    return list(hf(text=[text])["input_ids"][0])


def test_keep_end_turns_keeps_the_images_of_the_turns_that_are_left(tmp_path: Path, family: Path) -> None:
    said: list[dict[str, Any]] = []
    for url, answer in ((data_url(PHOTO), "One."), (data_url(OTHER), "Two.")):
        said += openai([url], "And this?", answer)["messages"]
    alone = build(tmp_path, family, [{"messages": said[2:]}]).row(0)
    limit = len(alone["input_ids"]) + 5
    entry = build(tmp_path, family, [{"messages": said}], max_length=limit, truncation="keep_end_turns")
    assert entry.row(0)["input_ids"] == alone["input_ids"]
    assert entry.row(0)["media"] == alone["media"]


def test_keep_start_cuts_behind_images_and_never_through_one(tmp_path: Path, family: Path) -> None:
    said = [
        *openai([data_url(PHOTO)], "And this?", "One.")["messages"],
        *openai([data_url(OTHER)], "", "Two.")["messages"],
    ]
    said[2]["content"] = [part for part in said[2]["content"] if part["type"] != "text"]
    whole = build(tmp_path, family, [{"messages": said}]).row(0)
    first, second = media_of(whole["media"])
    for limit, kept in ((second.at, (first,)), (len(whole["input_ids"]) - 2, (first, second))):
        values = build(tmp_path, family, [{"messages": said}], max_length=limit, truncation="keep_start").row(
            0
        )
        assert values["input_ids"] == whole["input_ids"][:limit]
        assert media_of(values["media"]) == kept
    with pytest.raises(SourceError, match=r"max_length cuts through an image \(1 row"):
        build(tmp_path, family, [{"messages": said}], max_length=second.at + 1, truncation="keep_start")


def test_without_a_processor_a_column_of_images_stays_refused(tmp_path: Path, sample: dict[str, str]) -> None:
    rows = [sharegpt([data_url(PHOTO)], "<image>What?")]
    with pytest.raises(
        SourceError, match=r"'images', which format chat does not use; images need a processor"
    ):
        build(tmp_path, sample["tokenizer"], rows)
    with pytest.raises(
        TokenizerError, match=r"source\.media says that rows have media, and .* has no processor"
    ):
        build(tmp_path, sample["tokenizer"], rows, source={"media": True})
    ignored = build(tmp_path, sample["tokenizer"], rows, source={"ignore": ["images"]})
    assert not set(COLUMNS) & set(ignored.entries[0].columns)


def test_text_rows_of_a_model_with_images_have_no_columns_and_the_key_of_before(
    tmp_path: Path, family: Path
) -> None:
    text = {"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Ho."}]}
    entry = build(tmp_path, family, [text] * 3)
    assert not set(COLUMNS) & set(entry.entries[0].columns)
    assert "media" not in entry.entries[0].recipe


def test_another_processor_gives_another_key(tmp_path: Path, family: Path) -> None:
    import shutil

    rows = [openai([data_url(PHOTO)])]
    first = build(tmp_path, family, rows)
    copy = Path(shutil.copytree(family, tmp_path / "copy"))
    assert build(tmp_path, copy, rows).key == first.key
    name = next(n for n in ("preprocessor_config.json", "processor_config.json") if (copy / n).exists())
    config = json.loads((copy / name).read_text())
    config.get("image_processor", config)["image_mean"] = [0.1, 0.2, 0.3]
    (copy / name).write_text(json.dumps(config))
    assert build(tmp_path, copy, rows).key != first.key


def test_columns_of_media_cannot_be_carried(tmp_path: Path, family: Path) -> None:
    with pytest.raises(ConfigError, match="'media_tokens' is a name that raysvc uses"):
        build(tmp_path, family, [openai([data_url(PHOTO)])], source={"carry": ["media_tokens"]})


@pytest.mark.parametrize("written", [False, True])
def test_a_tokenizer_that_begins_texts_with_a_token_does_so_once(written: bool, tmp_path: Path) -> None:
    from tokenizers import processors
    from transformers import LlavaProcessor

    from .families import USER_PARTS, llava, tokenizer

    folder = llava(tmp_path / "llava")
    given = LlavaProcessor.from_pretrained(folder)
    made = tokenizer(["<image>", "</s>", "<s>"], eos_token="</s>", pad_token="</s>", bos_token="<s>")
    bos = made.convert_tokens_to_ids("<s>")
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", bos)]
    )
    made.chat_template = given.chat_template = ("<s>" if written else "") + USER_PARTS
    given.tokenizer = made
    given.save_pretrained(folder)
    hf = MediaProcessor.load(str(folder)).hf
    assert hf.tokenizer("a")["input_ids"][0] == bos
    text = {"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Ho."}]}
    entry = build(tmp_path, folder, [openai([data_url(PHOTO)], "What?", "It."), text], source={"media": True})
    for row, (said, seen) in enumerate(
        [("What?", [{"type": "image", "image": Image.open(io.BytesIO(PHOTO))}]), ("Hi.", [])]
    ):
        asked = {"role": "user", "content": [*seen, {"type": "text", "text": said}]}
        answer = {"role": "assistant", "content": [{"type": "text", "text": "It." if seen else "Ho."}]}
        theirs = hf.apply_chat_template([asked, answer], tokenize=True, return_dict=True)["input_ids"]
        ids = entry.row(row)["input_ids"]
        assert ids == list(theirs[0] if isinstance(theirs[0], list) else theirs)
        assert ids.count(bos) == 1


def test_a_part_is_written_after_all_media_that_it_names(
    tmp_path: Path, family: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raysvc.cache.writer import EntryWriter
    from raysvc.media import media_desk
    from raysvc.media.media_store import write_medium

    written: list[str] = []

    def slow(store: Any, data: bytes) -> str:
        time.sleep(0.2)
        written.append(write_medium(store, data))
        return written[-1]

    own = EntryWriter.write_part

    def part(self: EntryWriter, index: int, table: pa.Table, meta: dict[str, Any]) -> Any:
        assert sorted(meta["media"]) == sorted(written)
        return own(self, index, table, meta)

    monkeypatch.setattr(media_desk, "write_medium", slow)
    monkeypatch.setattr(EntryWriter, "write_part", part)
    rows = [openai([data_url(jpeg(60, 44, seed))]) for seed in range(40)]
    assert build(tmp_path, family, rows).num_rows == 40
    assert len(written) == 40


def test_an_end_is_appended_behind_a_row_with_images_too(tmp_path: Path) -> None:
    folder = FAMILIES["qwen2_vl"](tmp_path / "model")
    made = MediaProcessor.load(str(folder)).hf
    endless = template_of(made).replace(
        "<|im_end|>\n{% endfor %}", "{% if not loop.last %}<|im_end|>\n{% endif %}{% endfor %}"
    )
    row = openai([data_url(PHOTO)], "And this?", "One.")
    files = str(write_jsonl(tmp_path / "rows.jsonl", [row]))
    plain, ended = (
        raysvc.tokenize(
            source={"path": files},
            tokenizer={"name": str(folder), "chat_template": endless},
            cache={"root": str(tmp_path / "cache")},
            **more,
        ).row(0)
        for more in ({}, {"train_end": "append"})
    )
    end = made.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert plain["input_ids"][-1] != end
    assert ended["input_ids"] == [*plain["input_ids"], end]
    assert ended["loss_mask"] == [*plain["loss_mask"], 1]
    assert media_of(ended["media"]) == media_of(plain["media"])
