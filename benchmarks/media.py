"""Image rows: built, through collators in rows per second, and bytes that cross nodes.

    python benchmarks/media.py [--quick] [--part build|collators|nodes]

Rows have one to three JPEGs of 224 x 168 to 560 x 420 pixels and 20 tokens of text; the processor is that of Qwen2-VL on Pillow and numpy. A
driver of two ranks takes steps and opens none. The first part builds such rows from JSON lines and files in one process, and the same rows without images. The last part runs two Ray nodes on this machine: the server and the driver are on one, a reader of all shards on the
other, and Ray says which shards lie on more than one node.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from common import quiet_ray, show

BATCH, DP_SIZE, WARM_STEPS = 32, 2, 4
STORE_BYTES = 1_500_000_000


def processor_folder(folder: Path) -> Path:
    """A tokenizer of bytes and Qwen2-VL's image processor."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={one: number for number, one in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    names = ("<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    end = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **end).save_pretrained(folder)
    Qwen2VLImageProcessorPil().save_pretrained(folder)
    config = folder / "preprocessor_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "processor_class": "Qwen2VLProcessor"}))
    return folder


def jpegs(count: int) -> list[bytes]:
    """Smooth colors with some noise, as a photograph has."""
    from PIL import Image

    rng = np.random.default_rng(0)
    made = []
    for _ in range(count):
        width = int(rng.integers(224, 560))
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3)).astype(np.uint8)).resize(
            (width, width * 3 // 4)
        )
        noisy = np.asarray(coarse).astype(np.int16) + rng.integers(-8, 9, (*coarse.size[::-1], 1))
        file = io.BytesIO()
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
        made.append(file.getvalue())
    return made


TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
)


def built(root: Path, processor_at: Path, num_rows: int, with_images: bool) -> dict[str, Any]:
    """Rows a second of a build that finds nothing in its cache; each image is a file of its own, in the page cache."""
    import raysvc

    folder = root / str(with_images)
    (folder / "images").mkdir(parents=True)
    rng, known, rows, nbytes, count = np.random.default_rng(1), jpegs(64), [], 0, 0
    for number in range(num_rows):
        parts: list[dict[str, Any]] = [{"type": "text", "text": f"What is in picture {number}?"}]
        for _ in range(int(rng.integers(1, 4)) if with_images else 0):
            data = known[int(rng.integers(0, len(known)))] + count.to_bytes(
                4, "big"
            )  # no two are the same medium
            (folder / "images" / f"{count}.jpg").write_bytes(data)
            parts.insert(0, {"type": "image", "path": f"images/{count}.jpg"})
            count, nbytes = count + 1, nbytes + len(data)
        content: Any = parts if with_images else parts[0]["text"]
        answer = {"role": "assistant", "content": "Nothing but colors."}
        rows.append({"messages": [{"role": "user", "content": content}, answer]})
    source = folder / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    job: dict[str, Any] = {
        "source": {"path": str(source)},
        "tokenizer": {"name": str(processor_at), "chat_template": TEMPLATE},
        "train_on": "all_tokens",
    }
    raysvc.tokenize({**job, "cache": {"root": str(folder / "warm")}, "max_length": 1 << 20})  # imports
    begin = time.perf_counter()
    entry = raysvc.tokenize({**job, "cache": {"root": str(folder / "cache")}})
    wall_s = time.perf_counter() - begin
    assert entry.num_rows == num_rows
    facts = {"rows/s": num_rows / wall_s, "images/s": count / wall_s, "MB/s of images": nbytes / wall_s / 1e6}
    return {"rows": "of 1 to 3 images" if with_images else "the same, without", **facts}


def entry_of(root: Path, processor_at: Path, num_rows: int) -> tuple[str, dict[str, float]]:
    """An entry of image rows, and what a row has on average."""
    from raysvc.cache.key import cache_key
    from raysvc.cache.store.open import open_store
    from raysvc.cache.writer import EntryWriter
    from raysvc.media.media_processor import MediaProcessor
    from raysvc.media.media_store import write_medium
    from raysvc.media.medium import Medium, text_of
    from raysvc.media.pixels import image_size

    rng, store, processor = (
        np.random.default_rng(1),
        open_store(str(root)),
        MediaProcessor.load(str(processor_at)),
    )
    known = []
    for data in jpegs(64):
        size = image_size(data)
        count = processor.replacement("image", *size)
        known.append(
            Medium(write_medium(store, data), "image", size, count.tokens, 0, count.patches, len(data))
        )
    rows = [
        [known[one] for one in rng.integers(0, len(known), int(rng.integers(1, 4)))] for _ in range(num_rows)
    ]
    ids = [[processor.token_ids["image"]] * sum(one.tokens for one in row) + [5] * 20 for row in rows]
    table = pa.table(
        {
            "input_ids": pa.array(ids, pa.list_(pa.int32())),
            "loss_mask": pa.array([[0] * (len(row) - 10) + [1] * 10 for row in ids], pa.list_(pa.uint8())),
            "source_row": pa.array(np.arange(num_rows)),
            "media": pa.array([text_of(row) for row in rows]),
            "media_tokens": pa.array([sum(one.tokens for one in row) for row in rows], pa.int32()),
            "media_patches": pa.array([sum(one.patches for one in row) for row in rows], pa.int32()),
        }
    )
    recipe = {"benchmark": "media", "rows": num_rows, "media": {"processor": processor.identity()}}
    writer = EntryWriter(store, cache_key(recipe))
    writer.commit([writer.write_part(0, table, {})], recipe, {"vocab_size": 300, "pad_token_id": 0})
    images = [one for row in rows for one in row]
    facts = {
        "images_per_row": len(images) / num_rows,
        "encoded_mb_per_step": sum(one.num_bytes for one in images) / num_rows * BATCH / 1e6,
        "patches_per_row": sum(one.patches for one in images) / num_rows,
    }
    return writer.uri, facts


def served(name: str, uri: str, processor_at: Path, collators: int) -> Any:
    """A server of that entry."""
    from raysvc.actors.launch import start_server
    from raysvc.actors.server.spec import ServeSpec
    from raysvc.job.config import PlanConfig
    from raysvc.media.row_pixels import ProcessorSpec

    plan = PlanConfig(batch_size=BATCH, layout="packed", micro_batch_tokens=8192, epochs=1000)
    spec = ServeSpec(
        name=name, entry_uri=uri, plan=plan, pad_token_id=0, journal=None, num_cpus=0, collators=collators,
        processor=ProcessorSpec(name=str(processor_at)), lease_ttl_s=120.0,
    )  # fmt: skip
    return start_server(spec, detached=False)


def throughput(uri: str, processor_at: Path, collators: int, steps: int) -> dict[str, Any]:
    """Rows a second of a driver that only waits for shards."""
    import ray

    import raysvc

    server = served(f"media-{collators}", uri, processor_at, collators)
    begin = 0.0
    with raysvc.attach(
        f"media-{collators}", DP_SIZE, look_ahead_steps=3, look_ahead_bytes=STORE_BYTES // 2
    ) as client:
        for step in client.steps(stop=WARM_STEPS + steps):
            refs = [ref for mini in step.mini_batches for ref in mini.shards]
            ray.wait(refs, num_returns=len(refs), fetch_local=False)
            nbytes = sum(mini.info.nbytes for mini in step.mini_batches)
            client.commit(step.index)
            if step.index == WARM_STEPS - 1:
                begin = time.perf_counter()
            del refs, step
    rows_s = BATCH * steps / (time.perf_counter() - begin)
    ray.kill(server)
    return {"collators": collators or "none: the server", "rows/s": rows_s, "MB of a step": nbytes / 1e6}


class Reader:
    """Opens shards on its node."""

    def node_id(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def read(self, refs: list[Any]) -> int:
        import ray

        from raysvc import read_shard

        return sum(read_shard(value).nbytes for value in ray.get(refs))


def crossing(uri: str, processor_at: Path, beside: bool, steps: int) -> dict[str, Any]:
    """Bytes of a step that are on both of two nodes after a reader of the second has them."""
    import ray
    from ray.cluster_utils import Cluster

    import raysvc

    node = {"num_cpus": 2, "object_store_memory": STORE_BYTES // 2}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    other = cluster.add_node(**node)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        place = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        reader = (
            ray.remote(num_cpus=0)(Reader)
            .options(scheduling_strategy=place(other.node_id, soft=False))
            .remote()
        )
        server = served("media-nodes", uri, processor_at, 2)
        crossed = made = 0
        with raysvc.attach(
            "media-nodes", DP_SIZE, look_ahead_steps=1, look_ahead_bytes=STORE_BYTES // 4
        ) as client:
            head = ray.get_runtime_context().get_node_id()
            client.collate_on([ray.get(reader.node_id.remote()) if beside else head])
            for step in client.steps(stop=steps):
                refs = [ref for mini in step.mini_batches for ref in mini.shards]
                made += ray.get(reader.read.remote(refs))
                found = ray.experimental.get_object_locations(refs).values()
                crossed += sum(each["object_size"] * (len(set(each["node_ids"])) - 1) for each in found)
                client.commit(step.index)
                del refs, step
        ray.kill(server)
    finally:
        ray.shutdown()
        cluster.shutdown()
    where = "on the workers' node" if beside else "on the other node"
    return {"collators": where, "MB of a step": made / steps / 1e6, "MB that cross": crossed / steps / 1e6}


def main() -> None:
    """Print two tables."""
    import ray

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps, with one and two collators alone")
    parser.add_argument("--part", choices=("build", "collators", "nodes"), help="this alone")
    args = parser.parse_args()
    parts = (args.part,) if args.part else ("build", "collators", "nodes")
    steps = 12 if args.quick else 24
    with tempfile.TemporaryDirectory() as folder:
        processor_at = processor_folder(Path(folder) / "processor")
        if "build" in parts:
            num_rows = 500 if args.quick else 2000
            made = [built(Path(folder) / "build", processor_at, num_rows, images) for images in (True, False)]
            show("Builds in one process", made)
        if parts == ("build",):
            return
        uri, facts = entry_of(Path(folder) / "cache", processor_at, 256)
        if "collators" in parts:
            quiet_ray(num_cpus=6, object_store_mb=STORE_BYTES // 2**20)
            rows = [
                throughput(uri, processor_at, count, steps)
                for count in ((1, 2) if args.quick else (0, 1, 2, 4))
            ]
            ray.shutdown()
            one = next(row["rows/s"] for row in rows if row["collators"] == 1)
            show("Image rows by collators", [{**row, "to one": row["rows/s"] / one} for row in rows], **facts)
        if "nodes" in parts:
            crossed = [crossing(uri, processor_at, beside, 4) for beside in (True, False)]
            show("Bytes between nodes", crossed, **facts)


if __name__ == "__main__":
    main()
