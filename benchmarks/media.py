"""Image rows: built, through collators in rows per second, and bytes that cross nodes.

    python benchmarks/media.py [--quick] [--part build|collators|ceiling|nodes]

Rows have one to three JPEGs of 224 x 168 to 560 x 420 pixels and 20 tokens of text; the processor is that of Qwen2-VL on Pillow and numpy. A
driver of two ranks takes steps and opens none. The ceiling is what plain processes give that make the same shards at the same time, without Ray, a server or a store. The first part builds such rows from JSON lines and files in one process, and the same rows without images. The last part runs two Ray nodes on this machine: the server and the driver are on one, a reader of all shards on the
other, and Ray says which shards lie on more than one node.

Figures (11-23): rows with two JPEGs each are built at 992 rows/s, since each image is hashed and synced. Two collators give 1.84 times the
rows of one, and plain processes without Ray 1.84 too (`--part ceiling`).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
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


def spec_of(name: str, uri: str, processor_at: Path, collators: int) -> Any:
    """What is served of that entry."""
    from raysvc.actors.server.spec import ServeSpec
    from raysvc.job.config import PlanConfig
    from raysvc.media.processor_spec import ProcessorSpec

    plan = PlanConfig(batch_size=BATCH, layout="packed", micro_batch_tokens=8192, epochs=1000)
    return ServeSpec(
        name=name, sources=[uri], plan=plan, pad_token_id=0, journal=None, num_cpus=0, collators=collators,
        processor=ProcessorSpec(name=str(processor_at)), lease_ttl_s=120.0,
    )  # fmt: skip


def served(name: str, uri: str, processor_at: Path, collators: int) -> Any:
    """A server of that entry."""
    from raysvc.actors.launch import start_server

    return start_server(spec_of(name, uri, processor_at, collators), detached=False)


def make_shards(spec_json: str, mine: list[tuple[int, int]], ready: Any) -> None:
    """What a collator does, without Ray: the shards of some (step, rank), handed to nobody."""
    from raysvc.actors.server.entry_stream import streams_of
    from raysvc.actors.server.spec import Part, Role, ServeSpec
    from raysvc.collate.reused_memory import keep_freed_memory

    keep_freed_memory()
    (source,) = streams_of(ServeSpec.model_validate_json(spec_json)).values()
    source.make(*mine[0][:1], (Role(DP_SIZE),), Part(0, mine[0][1]))  # loads the processor
    ready.wait()
    for step, rank in mine:
        _, shards = source.make(step, (Role(DP_SIZE),), Part(0, rank))
        for shard in shards:
            shard.to_wire()
    ready.wait()


def ceiling(uri: str, processor_at: Path, processes: int, steps: int) -> float:
    """Rows a second of plain processes that make the shards of collators at the same time."""
    import multiprocessing

    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Barrier(processes + 1)
    spec_json = spec_of("plain", uri, processor_at, 0).model_dump_json()
    parts = [(step, rank) for step in range(steps) for rank in range(DP_SIZE)]
    started = [
        spawn.Process(target=make_shards, args=(spec_json, parts[number::processes], ready))
        for number in range(processes)
    ]
    for process in started:
        process.start()
    ready.wait()
    begin = time.perf_counter()
    ready.wait()
    rows_s = BATCH * steps / (time.perf_counter() - begin)
    for process in started:
        process.join()
    return rows_s


def run_on(cpus: set[int]) -> None:
    """All threads of this process and of those that it started, and what they start from now on."""
    import psutil

    this = psutil.Process()
    for process in [this, *this.children(recursive=True)]:
        for task in Path(f"/proc/{process.pid}/task").glob("*"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(task.name), cpus)


def one_to_two(uri: str, processor_at: Path, rounds: int, steps: int) -> list[dict[str, Any]]:
    """Plain processes and collators in turn, one of them and two: how much the second adds.

    And one collator where all processes share one core, which two collators on two cores are compared with.
    """
    found = []
    cpus = os.sched_getaffinity(0)
    for number in range(rounds):
        plain = [ceiling(uri, processor_at, count, steps) for count in (1, 2)]
        run_on({min(cpus)})
        alone = throughput(uri, processor_at, 1, steps)["rows/s"]
        run_on(cpus)
        ours = [(made := throughput(uri, processor_at, count, steps))["rows/s"] for count in (1, 2)]
        found.append(
            {
                "round": number, "1 process": plain[0], "2": plain[1], "ratio": plain[1] / plain[0],
                "1 collator": ours[0], "2 of them": ours[1], "ratio of them": ours[1] / ours[0],
                "1 on one core": alone, "ratio of cores": ours[1] / alone, "of the processes' ratio": ours[1] / ours[0] / (plain[1] / plain[0]), "load": os.getloadavg()[0],
            }
            | {name: value for name, value in made.items() if name.startswith("CPU")}
        )  # fmt: skip
        print(json.dumps({name: round(value, 2) for name, value in found[-1].items()}), flush=True)
    return found


def cpu_seconds() -> dict[str, float]:
    """CPU seconds so far of this process, of collators, of the server, and of Ray's own processes."""
    import psutil

    found = dict.fromkeys(("driver", "collators", "server", "ray"), 0.0)
    this = psutil.Process()
    for process in [this, *this.children(recursive=True)]:
        try:
            name, times = process.name(), process.cpu_times()
        except psutil.Error:
            continue
        who = "collators" if name.startswith("ray::Collator") else "server" if "Server" in name else "ray"
        found["driver" if process == this else who] += times.user + times.system
    return found


def throughput(uri: str, processor_at: Path, collators: int, steps: int) -> dict[str, Any]:
    """Rows a second of a driver that only waits for shards."""
    import ray

    import raysvc

    server = served(f"media-{collators}", uri, processor_at, collators)
    begin, before = 0.0, cpu_seconds()
    with raysvc.attach(
        f"media-{collators}", DP_SIZE, look_ahead_steps=3, look_ahead_bytes=STORE_BYTES // 2
    ) as client:
        for step in client.steps(stop=WARM_STEPS + steps):
            refs = [ref for mini in step.mini_batches for ref in mini.shards]
            ray.wait(refs, num_returns=len(refs), fetch_local=False)
            nbytes = sum(mini.info.nbytes for mini in step.mini_batches)
            client.commit(step.index)
            if step.index == WARM_STEPS - 1:
                begin, before = time.perf_counter(), cpu_seconds()
            del refs, step
        rows_s = BATCH * steps / (time.perf_counter() - begin)
        cpu = {who: 1e3 * (now - before[who]) / (BATCH * steps) for who, now in cpu_seconds().items()}
    ray.kill(server)
    facts = {"collators": collators or "none: the server", "rows/s": rows_s, "MB of a step": nbytes / 1e6}
    return facts | {f"CPU ms a row, {who}": value for who, value in cpu.items()}


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
        head = ray.get_runtime_context().get_node_id()
        with raysvc.attach(
            "media-nodes",
            DP_SIZE,
            locality_hints=[ray.get(reader.node_id.remote()) if beside else head],
            look_ahead_steps=1,
            look_ahead_bytes=STORE_BYTES // 4,
        ) as client:
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
    """Print the tables."""
    import ray

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps, with one and two collators alone")
    parser.add_argument("--part", choices=("build", "collators", "ceiling", "nodes"), help="this alone")
    args = parser.parse_args()
    parts = (args.part,) if args.part else ("build", "collators", "ceiling", "nodes")
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
        if "ceiling" in parts:
            quiet_ray(num_cpus=6, object_store_mb=STORE_BYTES // 2**20)
            show(
                "The second collator, and the second plain process",
                one_to_two(uri, processor_at, 1 if args.quick else 5, steps),
            )
            ray.shutdown()
        if "nodes" in parts:
            crossed = [crossing(uri, processor_at, beside, 4) for beside in (True, False)]
            show("Bytes between nodes", crossed, **facts)


if __name__ == "__main__":
    main()
