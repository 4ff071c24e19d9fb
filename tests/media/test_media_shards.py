"""The arrays of media in shards: those of the processor, row by row, in every layout, whoever makes them."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysvc.actors.server.entry_stream import EntryStream
from raysvc.actors.server.make_step import Recipe
from raysvc.actors.server.spec import Part, Role, SourceSpec
from raysvc.collate.shard import Shard
from raysvc.collate.with_media import with_media
from raysvc.errors import ConfigError, EntryError, TokenizerError
from raysvc.job.config import PlanConfig
from raysvc.media.media_store import medium_path
from raysvc.media.processor_spec import ProcessorSpec

from .vision_models import ALL_FAMILIES, LAYOUTS, build_rows, conversations, given, hf_of

ARRAYS = (
    "pixel_values",
    "image_grid_thw",
    "pixel_values_videos",
    "video_grid_thw",
    "input_features",
    "feature_attention_mask",
)
ROOT = Path(__file__).parents[2]
WINDOWED = {
    **LAYOUTS,
    "windowed": {**LAYOUTS["packed"], "shuffle": "window(1)"},
}  # of one slice: rows keep their numbers


SERVED = ["qwen2_vl", "llava", "qwen2_audio", "qwen2_vl_videos"]


def in_layouts(layouts: Iterable[str]) -> pytest.MarkDecorator:
    """Every family in each of the layouts; the first tier has one family in all of them, and the others packed."""
    pairs = [(name, layout) for name in SERVED for layout in sorted(layouts)]
    first = [name == SERVED[0] or layout == "packed" for name, layout in pairs]
    return pytest.mark.parametrize(
        ("served", "layout"),
        [
            pytest.param(*pair, marks=[pytest.mark.slow] * (not quick))
            for pair, quick in zip(pairs, first, strict=True)
        ],
        indirect=["served"],
    )


@pytest.fixture(scope="module", params=SERVED)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(processor folder, rows, uri of their entry)."""
    folder = ALL_FAMILIES[request.param](tmp_path_factory.mktemp(request.param))
    rows = conversations(request.param, hf_of(folder))
    return folder, rows, build_rows(tmp_path_factory.mktemp("cache"), folder, rows)


CHANGED = {"image_mean": [0.1, 0.2, 0.3], "padding_value": 0.5}


def stream(served: Any, layout: str = "rows", **plan: Any) -> EntryStream:
    folder, _, uri = served
    config = PlanConfig(**{"batch_size": 7, "shuffle": "none", **WINDOWED[layout], **plan})
    return EntryStream(
        [SourceSpec(uri=uri)], {}, Recipe(config, 0), processor=ProcessorSpec(name=str(folder))
    )


def the_reader() -> Any:
    """What a worker without raysvc copies."""
    loaded = importlib.util.spec_from_file_location("foreign_reader", ROOT / "examples" / "read_shard.py")
    assert loaded is not None
    assert loaded.loader is not None
    module = importlib.util.module_from_spec(loaded)
    loaded.loader.exec_module(module)
    return module


def arrays_of(folder: Path, row: dict[str, Any]) -> dict[str, np.ndarray]:
    """What the processor gives for a row, by itself."""
    hf = hf_of(folder)
    text = hf.apply_chat_template(row["told"], tokenize=False)
    made = hf(text=[text], **given(row["media"]), return_tensors="np")
    return {name: made[name] for name in ARRAYS if name in made}


@in_layouts(WINDOWED)
def test_each_row_has_the_arrays_of_the_processor_in_shards_and_micro_batches(
    served: Any, layout: str
) -> None:
    folder, rows, _ = served
    expected = [arrays_of(folder, row) if row["media"] else {} for row in rows]
    seen = []
    for shard in stream(served, layout).make(0, (3,))[1]:
        names = [name.removesuffix("_bounds") for name in shard.arrays if name.endswith("_bounds")]
        assert names
        for name in names:
            bounds = shard.arrays[f"{name}_bounds"]
            assert bounds.dtype == np.int32
            for place, row in enumerate(shard.row_ids.tolist()):
                own = shard.arrays[name][bounds[place] : bounds[place + 1]]
                assert (name in expected[row] if row >= 0 else False) == bool(len(own))
                if len(own):
                    # the oracle of videos scales before it normalizes
                    off = 1e-6 if name == "pixel_values_videos" else 0.0
                    np.testing.assert_allclose(own, expected[row][name], rtol=0, atol=off)
            micros = [shard.micro(index) for index in range(len(shard.micro_batches))]
            assert np.array_equal(np.concatenate([micro[name] for micro in micros]), shard.arrays[name])
            theirs = the_reader().read_shard(shard.to_wire())
            for other, micro in zip(theirs.micro_batches(), micros, strict=True):
                assert all(np.array_equal(other[name], micro[name]) for name in micro)
                own_bounds = micro[f"{name}_bounds"]
                assert len(own_bounds) == len(micro["seq_lengths"]) + 1
                assert own_bounds[-1] - own_bounds[0] == len(micro[name])
        seen += [row for row in shard.row_ids.tolist() if row >= 0]
    assert sorted(seen) == list(range(7))


@in_layouts(LAYOUTS)
def test_parts_made_one_by_one_are_those_made_together(served: Any, layout: str) -> None:
    roles = (Role(2), Role(3, ("input_ids", "labels", "media")), Role(1, ("input_ids",)))
    info, together = stream(served, layout, mini_batch_size=4).make(0, roles)
    parts = [Part(number, rank) for number, role in enumerate(roles) for rank in range(role.dp_size)]
    alone = [stream(served, layout, mini_batch_size=4).make(0, roles, part) for part in parts]
    made = [shards[mini] for mini in range(2) for _, shards in alone]
    assert [shard.digest() for shard in made] == [shard.digest() for shard in together]
    assert [one.rank_bytes for one in alone[0][0].mini_batches] == [
        one.rank_bytes for one in info.mini_batches
    ]
    assert {*ARRAYS} & {*together[2].arrays}
    assert not {*ARRAYS} & {*together[5].arrays}, "a role without media"


def test_bytes_are_planned_from_patches(served: Any) -> None:
    source = stream(served, mini_batch_size=4)
    info, shards = source.make(0, (2,))
    planned = [mini.rank_bytes for mini in source.outline(0, 2).mini_batches]
    assert [mini.rank_bytes for mini in info.mini_batches] == planned
    assert sum(map(sum, planned)) == pytest.approx(sum(shard.nbytes for shard in shards), rel=0.01)


def test_a_medium_that_went_missing_or_changed_fails_its_step_by_digest(served: Any, tmp_path: Path) -> None:
    folder, rows, uri = served
    root = shutil.copytree(
        Path(uri).parent, tmp_path / "cache", ignore=shutil.ignore_patterns("use-*", "used-*")
    )
    here = (folder, rows, str(root / Path(uri).name))
    medium = next(path for path in (root / ".media").rglob("*") if path.is_file())
    assert medium_path(medium.name) == str(medium.relative_to(root))
    data = medium.read_bytes()
    medium.unlink()
    with pytest.raises(EntryError, match=f"{medium.name}.*missing"):
        stream(here).make(0, (1,))
    medium.write_bytes(data[:-1] + b"x")
    with pytest.raises(EntryError, match="not those that were written"):
        stream(here).make(0, (1,))
    medium.write_bytes(data)
    stream(here).make(0, (1,))


def test_a_processor_other_than_that_of_the_build_is_refused(served: Any, tmp_path: Path) -> None:
    import json

    folder, rows, uri = served
    other = shutil.copytree(folder, tmp_path / "other")
    named = [
        path
        for path in other.glob("*processor_config.json")
        if any(key in path.read_text() for key in CHANGED)
    ]
    for path in named:
        text = path.read_text()
        found = json.loads(text)
        part = found.get("image_processor") or found.get("feature_extractor") or found
        part |= {key: value for key, value in CHANGED.items() if key in part}
        path.write_text(json.dumps(found))
    assert named
    with pytest.raises(TokenizerError, match="not the one that the entry was built with"):
        stream((other, rows, uri)).make(0, (1,))


def test_media_of_several_shapes_are_refused_by_name() -> None:
    shard = Shard(0, 0, 0, "padded_right", {}, np.array([0, 1]), None, ())  # type: ignore[arg-type]

    def pixels(media: str | None) -> dict[str, np.ndarray]:
        return {"pixel_values": np.zeros((1, 3, len(media or ""), 2), np.float32)}

    with pytest.raises(ConfigError, match=r"pixel_values of shapes \[1, 3, 2, 2\] and \[1, 3, 4, 2\]"):
        with_media(shard, {0: "aa", 1: "aaaa"}, pixels, pixels("aa"))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("served", ["llava", "qwen2_vl_videos"], indirect=True)
def test_collators_give_a_trainer_the_pixels_of_the_server(
    served: Any, serve: Callable[..., Any], streams: Any
) -> None:
    import raysvc

    folder, _, uri = served
    fields = {
        "sources": [uri],
        "processor": ProcessorSpec(name=str(folder)),
        "plan": {"batch_size": 4, "mini_batch_size": 2, "layout": "packed"},
    }
    got = {}
    for name, collators in (("pixels-server", 0), ("pixels-beside", 2)):
        serve(name, collators=collators, **fields)
        with raysvc.attach(name, dp_size=2, look_ahead_steps=2) as client:
            got[collators] = streams.take(client, stop=4)
    assert got[2] == got[0]
    assert len(got[0]) == 4
