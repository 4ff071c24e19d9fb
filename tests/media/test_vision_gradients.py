"""The gradient of a vision model on collated shards is that of one process, row by row, from the raw images.

The reference uses the model and the processor of `transformers` alone, in float64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raysvc.actors.model.load_model import load_lm
from raysvc.actors.server.entry_stream import EntryStream
from raysvc.actors.server.make_step import Recipe
from raysvc.actors.server.spec import SourceSpec
from raysvc.actors.worker.losses import SftLoss
from raysvc.job.config import PlanConfig
from raysvc.media.processor_spec import ProcessorSpec
from tests.actors.ranks import DoubleWorker, Ranks, gradients_of, tiny_spec
from tests.actors.reference import distance

from .vision_models import LAYOUTS, build_rows, conversations, given, hf_of, model_folder, rendered

pytestmark = pytest.mark.ray
IMAGES = ["qwen2_vl", "llava", "llava_next", "idefics3", "smolvlm", "qwen3_vl", "internvl"]
ENCODERS = ("visual", "vision_tower", "vision_model", "audio_tower")
TRAINED = [*IMAGES, "qwen2_audio", "qwen2_5_omni", "qwen2_vl_videos", "qwen2_5_vl_videos"]
# the second tier has the others: each is read as one of these is
FIRST_TIER = ["qwen2_vl", "llava_next", "idefics3", "qwen3_vl", "qwen2_audio", "qwen2_vl_videos"]
EXACT = 3e-7  # loss weights and pixels travel as float32


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] * (name not in FIRST_TIER)) for name in TRAINED],
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(model folder, rows, uri of their entry)."""
    folder = model_folder(request.param, tmp_path_factory.mktemp(request.param))
    rows = conversations(request.param, hf_of(folder))
    return folder, rows, build_rows(tmp_path_factory.mktemp("cache"), folder, rows)


@pytest.fixture(scope="module")
def expected(family: Any) -> tuple[dict[str, np.ndarray], float]:
    """Gradient and loss of all rows as one mini-batch."""
    folder, rows, _ = family
    lm, hf = load_lm(str(folder), 0).double(), hf_of(folder)
    targets = sum(row["end"] - row["prompt"] for row in rows)
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        text = rendered(hf, row["told"])
        media = given(row["media"])
        made = hf(text=[text], **media, add_special_tokens=False, return_tensors="pt")
        logits = lm(**made, use_cache=False).logits[0]
        where = torch.arange(row["prompt"], row["end"])
        total = total + torch.nn.functional.cross_entropy(
            logits[where - 1], made["input_ids"][0][where], reduction="sum"
        )
    (total / targets).backward()
    # what no row reaches (a layer behind the one that LLaVA takes) has no gradient here
    grads = {
        f"lm.{name}": (torch.zeros_like(p) if p.grad is None else p.grad).numpy().copy()
        for name, p in lm.named_parameters()
    }
    return grads, float(total.detach() / targets)


def shards_of(family: Any, layout: str, dp_size: int) -> list[Any]:
    folder, _, uri = family
    plan = PlanConfig(batch_size=7, shuffle="none", **LAYOUTS[layout])
    stream = EntryStream(
        [SourceSpec(uri=uri)], {}, Recipe(plan, 0), processor=ProcessorSpec(name=str(folder))
    )
    _, shards = stream.make(0, (dp_size,))
    return list(shards)


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.slow] * (name != "packed")) for name in sorted(LAYOUTS)]
)
def test_one_rank_has_the_gradient_of_the_raw_images(family: Any, expected: Any, layout: str) -> None:
    grads, loss = expected
    worker = DoubleWorker(0, 1, "cpu", spec_of(family[0]).model_dump_json())
    worker.setup("")
    (shard,) = shards_of(family, layout, 1)
    ((found, metrics),) = gradients_of(worker, [shard], [SftLoss()])
    assert metrics["loss"] == pytest.approx(loss, rel=1e-6)
    assert distance(found, grads) < EXACT
    encoder = [name for name in grads if any(part in name for part in ENCODERS)]
    assert sum(float(np.abs(found[name]).sum()) for name in encoder) > 0, "the media have a part in it"


@pytest.fixture(scope="module")
def ranks(ray_session: None) -> Ranks:
    return Ranks()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_have_the_gradient_of_the_raw_images_also_where_one_has_no_image(
    family: Any, expected: Any, ranks: Ranks, strategy: str
) -> None:
    folder, (grads, loss), without = family[0], expected, 0
    for layout, dp_size in (("rows", 2), ("packed", 2), ("left", 3)):
        shards = shards_of(family, layout, dp_size)
        micros = [[shard.micro(index) for index in range(len(shard.micro_batches))] for shard in shards]
        without += sum(
            len(micro.get("pixel_values", micro.get("input_features"))) == 0
            for own in micros
            for micro in own
        )
        results = ranks.run(
            spec_of(folder, strategy=strategy), gradients_of, [([shard], [SftLoss()]) for shard in shards]
        )
        assert sum(rank[0][1]["loss"] for rank in results) == pytest.approx(loss, rel=1e-6), layout
        for rank in results:
            assert distance(rank[0][0], grads) < EXACT, layout
    assert without, "a rank had no image while others had some"


def spec_of(folder: Path, **changes: Any) -> Any:
    return tiny_spec(model=str(folder), **changes)
