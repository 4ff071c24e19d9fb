"""`tiny-vision`: a model of pictures for trying, without a download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raysvc.cli.demo_images import write_image_job
from raysvc.errors import ConfigError
from raysvc.job.job_file import load_job

from .families import llava
from .rows import jpeg, openai, write_jsonl


def vision_of(folder: Path, job: dict[str, Any]) -> Any:
    """What a run of the job would make of its model."""
    import raysvc
    from raysvc.training import model_name

    loaded = load_job({**job, "cache": {"root": str(folder / "cache")}})
    return model_name.vision_of(loaded, raysvc.tokenize(loaded))


def test_the_same_pictures_rows_and_processor_are_written_again(tmp_path: Path) -> None:
    written = []
    for name in ("one", "two"):
        path = write_image_job(tmp_path / name, 24)
        files = sorted(one for one in path.parent.rglob("*") if one.is_file() and one != path)
        written.append({str(one.relative_to(path.parent)): one.read_bytes() for one in files})
    assert written[0] == written[1]
    assert len([name for name in written[0] if name.endswith(".jpg")]) == 21


@pytest.mark.parametrize(
    ("processor", "kind"), [("Qwen2VLProcessor", "Qwen2VL"), ("Qwen2_5_VLProcessor", "Qwen2_5_VL")]
)
def test_the_model_is_transformers_own_and_sees_what_the_processor_gives(
    processor: str, kind: str, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForImageTextToText

    from raysvc.actors.model.load_model import load_lm
    from raysvc.media.media_processor import MediaProcessor
    from raysvc.media.pixels import rgb

    path = write_image_job(tmp_path, 24, trainer={"model": "tiny-vision"})
    config = tmp_path / "tokenizer" / "preprocessor_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "processor_class": processor}))
    vision = vision_of(tmp_path, {**load_job(path).model_dump(mode="json", exclude_unset=True)})
    torch.manual_seed(0)
    lm = load_lm("tiny-vision", 512, vision=vision)
    assert type(lm).__name__ == f"{kind}ForConditionalGeneration"
    lm.save_pretrained(tmp_path / "saved")
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved")
    hf = MediaProcessor.load(str(tmp_path / "tokenizer")).hf
    logits = []
    for model, name in ((lm, "00000.jpg"), (again, "00000.jpg"), (lm, "00001.jpg")):
        picture = rgb((tmp_path / "images" / name).read_bytes()).resize((84, 84))
        made = hf(
            text=["<|vision_start|><|image_pad|><|vision_end|>?"], images=[picture], return_tensors="pt"
        )
        with torch.no_grad():
            logits.append(model.eval()(**made, use_cache=False).logits[0, -1])
    assert torch.equal(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2], atol=0.1), "it looks at the picture"


def test_a_model_that_does_not_fit_the_rows_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "sky.jpg").write_bytes(jpeg(60, 44))
    rows = str(write_jsonl(tmp_path / "rows.jsonl", [openai(["sky.jpg"])]))
    texts = str(write_jsonl(tmp_path / "texts.jsonl", [openai([])]))
    ours = str(write_image_job(tmp_path / "ours", 8).parent / "tokenizer")
    theirs = str(llava(tmp_path / "llava"))
    refused = [
        ({"source": {"path": rows}, "tokenizer": ours}, "tiny", "tiny reads text alone.*give tiny-vision"),
        ({"source": {"path": texts}, "tokenizer": ours}, "tiny-vision", "is for rows with media.*give tiny"),
        ({"source": {"path": rows}, "tokenizer": theirs}, "tiny-vision", "rows have those of LlavaProcessor"),
    ]
    for job, model, why in refused:
        with pytest.raises(ConfigError, match=rf"trainer\.model: .*{why}"):
            vision_of(tmp_path, {**job, "trainer": {"model": model}})


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_of_pictures_learns_what_only_they_say(
    tmp_path: Path, ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import raysvc
    from raysvc.cli.demo import write_image_job as write_demo

    monkeypatch.chdir(tmp_path)
    job = load_job(write_demo(Path("demo"), 400), server={"name": "pictures"})
    summary = raysvc.train(job).metrics
    # of some five trained tokens one is the color, one in four: who cannot see it loses at least 0.2 a token
    assert summary["loss_last"] < 0.1 < 0.2 < summary["loss_first"]
    assert (tmp_path / "runs" / "demo-images" / "model" / "preprocessor_config.json").exists()


def test_a_model_without_an_encoder_is_refused_media() -> None:
    import torch

    from raysvc.actors.model.load_model import load_lm
    from raysvc.actors.model.media_inputs import media_inputs

    tensors = {"pixel_values": torch.zeros(1, 3), "pixel_values_bounds": torch.zeros(2)}
    with pytest.raises(
        ConfigError, match=r"trainer\.model: the rows have media, and TinyLM reads text alone"
    ):
        media_inputs(load_lm("tiny", 64), tensors, torch.zeros(1, 1))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_window_of_pictures_trains_while_it_is_built_as_when_it_is_there(
    tmp_path: Path, ray_session: None
) -> None:
    import raysvc

    path = write_image_job(tmp_path, 48)
    logs, sections = {}, load_job(path).model_dump(mode="json", exclude_unset=True)
    for name in ("ahead", "beside"):
        job = load_job(
            {
                **sections,
                "cache": {"root": str(tmp_path / f"{name}-cache")},
                "workers": {"slice_mb": (tmp_path / "rows.jsonl").stat().st_size / 6e6},
                "plan": {"batch_size": 8, "shuffle": "window(3)", "layout": "packed", "epochs": 2},
                "max_length": 256,
                "server": {"name": f"window-{name}", "collators": 1, "num_cpus": 0},
                "trainer": {"dp_size": 2, "model": "tiny-vision", "run_dir": str(tmp_path / name)},
            }
        )
        if name == "ahead":
            assert len(raysvc.tokenize(job).entries[0].slice_starts) > 4
        assert raysvc.train(job).metrics["cache"]["hit"] == (name == "ahead")
        metrics = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        rows = [json.loads(line) for line in (tmp_path / name / "rows.jsonl").read_text().splitlines()]
        assert len({row for line in rows if line["epoch"] == 1 for row in line["row_ids"]}) == 48
        logs[name] = rows, [line["loss"] for line in metrics]
    assert logs["ahead"] == logs["beside"]


def test_a_source_that_is_followed_takes_media_which_gc_keeps(tmp_path: Path) -> None:
    import raysvc
    from raysvc.actors.server.entry_stream import streams_of
    from raysvc.actors.server.spec import TRAIN
    from raysvc.api import serve_spec
    from raysvc.builds.find_or_build import begin
    from raysvc.builds.lookup import look
    from raysvc.cache.gc import collect_garbage
    from raysvc.cache.store.open import open_store
    from raysvc.media.media_gc import remove_media

    sections = load_job(write_image_job(tmp_path, 24)).model_dump(mode="json", exclude_unset=True)
    rows = tmp_path / "rows.jsonl"
    text = rows.read_text().splitlines(keepends=True)

    def job_of(follow: bool) -> Any:
        return load_job(
            {
                **sections,
                "source": {"path": str(rows), "follow": follow},
                "cache": {"root": str(tmp_path / "cache")},
                "plan": {"batch_size": 8, "shuffle": "window(3)"},
                "server": {"name": "eyes"},
            }
        )

    def rows_of(job: Any, steps: int) -> dict[int, Any]:
        """Source row -> what a rank gets of it."""
        entry = raysvc.tokenize(job)
        stream = streams_of(serve_spec(job, entry))[TRAIN]
        found = {}
        for step in range(steps):
            for shard in stream.make(step, (8,))[1]:
                [row] = [one for one in shard.row_ids.tolist() if one >= 0]
                pixels = shard.arrays["pixel_values"].tobytes()
                found[entry.row(row)["source_row"]] = entry.row(row)["input_ids"], pixels
        return found

    def media_files() -> set[str]:
        return {path.name for path in (tmp_path / "cache" / ".media").rglob("*") if len(path.name) == 64}

    def removed_media(held: bool = False) -> list[str]:
        for marker in () if held else (tmp_path / "cache").glob("*/use-*"):
            marker.unlink()  # of this process, which reads what it wrote
        found = collect_garbage(open_store(str(tmp_path / "cache")), beside=remove_media, grace_s=0.0)
        return [one.action for one in found if one.folder == ".media"]

    rows.write_text("".join(text[:8]))
    first = rows_of(job_of(True), 1)
    kept = media_files()
    assert kept
    assert removed_media() == []
    assert media_files() == kept, "its receipts name them"
    (tmp_path / "cache" / ".media" / "ab").mkdir()
    (tmp_path / "cache" / ".media" / "ab" / ("ab" * 32)).write_bytes(b"of nobody yet")
    build = begin(look(job_of(True), str(tmp_path / "cache")))
    assert removed_media(held=True) == ["skipped"], "who follows may refer to it"
    build.hold.release()
    assert removed_media() == ["removed"]
    with rows.open("a") as file:
        file.write("".join(text[8:16]))
    followed = rows_of(job_of(True), 2)
    assert first.items() <= followed.items()
    assert followed == rows_of(job_of(False), 2)
