"""What host memory the ranks of the built-in trainer take while they load a model, and what they took when each read all of it.

    python benchmarks/load_weights.py [--ranks 2] [--folder /tmp] [--layers 22]

A Llama of 1.1 billion random weights, in bfloat16 in files of 500 MB, is trained in float32 with FSDP2 on ranks of this machine.
`own` is memory that no file backs, `in use` also counts pages of the files, which the kernel takes back where it needs them (those
that several processes look at are split among them). All ranks of a node are summed up at the same moment, every 50 ms.

Figures (11-28, beside other work): 4.1 GiB of float32 weights on two ranks peak at 5.0 GiB of the node's own memory (6.4 in use)
instead of 8.8 (10.7): 4.5 on the first rank, which reads, and 2.6 on the other one instead of 4.4 each.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != HERE]  # it has a tokenize.py

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import subprocess  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from typing import Any  # noqa: E402

GIB = 1 << 30


def write_model(folder: Path, layers: int) -> None:
    """Write the model's files."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=4, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(
        folder, max_shard_size="500MB"
    )


def load(rank: int, ranks: int, folder: Path, each: bool) -> None:
    """Be a rank; `each` reads the whole model in every rank, and shards it then."""
    from raysvc.actors.worker.process_group import join
    from raysvc.actors.worker.torch_worker import CausalLMWorker, ModelSpec, _sharded

    spec = ModelSpec(
        model=str(folder / "model"), vocab_size=32000, learning_rate=1e-5, weight_decay=0.0, max_grad_norm=None,
        loss="token_mean", seed=0, strategy="fsdp", layouts=("packed",),
    )  # fmt: skip
    worker = CausalLMWorker(rank, ranks, "cpu", spec.model_dump_json())
    join("cpu", f"file://{folder}/meet-{each}", rank, ranks)
    print("ready", flush=True)
    input()
    import torch

    if each:
        torch.manual_seed(0)
        worker.model = _sharded(worker._make(), "cpu", ranks, bf16=False)
    else:
        worker.build()
    total = sum(float(weight.to_local().sum(dtype=torch.float64)) for weight in worker.model.parameters())
    print(json.dumps(total), flush=True)
    input()


def memory(pid: int) -> tuple[int, int]:
    """Bytes of a process: its own, and in use."""
    found = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split(":")
        found[name] = 1024 * int(value.split()[0])
    return found["Pss_Anon"], found["Pss"]


def measure(folder: Path, ranks: int, each: bool) -> dict[str, Any]:
    """Run the ranks, and look at their memory meanwhile."""
    command = [sys.executable, "-W", "ignore", __file__, "--one", str(folder), "--ranks", str(ranks)]
    running = [
        subprocess.Popen(
            [*command, "--rank", str(rank), *(["--each"] if each else [])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    for process in running:
        assert process.stdout.readline() == "ready\n"
    before = [memory(process.pid) for process in running]
    begin = time.monotonic()
    for process in running:
        process.stdin.write("\n")
        process.stdin.flush()
    told: dict[int, str] = {}
    most = [[0, 0] for _ in range(ranks + 1)]  # of each rank, and of the node
    for process in running:
        os.set_blocking(process.stdout.fileno(), False)
    while len(told) < ranks:
        time.sleep(0.05)
        now = [memory(process.pid) for process in running]
        for index, (own, used) in enumerate([*now, tuple(map(sum, zip(*now, strict=True)))]):
            most[index] = [max(most[index][0], own), max(most[index][1], used)]
        for rank, process in enumerate(running):
            if rank not in told and (line := process.stdout.readline()):
                told[rank] = line
            assert process.poll() is None, f"rank {rank} ended"
    seconds = time.monotonic() - begin
    for process in running:
        process.kill()
        process.wait()
    names = [*(f"rank {rank}" for rank in range(ranks)), "node"]
    bare = [*before, tuple(map(sum, zip(*before, strict=True)))]
    return {
        "seconds": round(seconds, 1),
        "sum of weights": sum(json.loads(line) for line in told.values()),
        **{
            name: {
                "before": round(b[0] / GIB, 2),
                "own": round(m[0] / GIB, 2),
                "in use": round(m[1] / GIB, 2),
            }
            for name, b, m in zip(names, bare, most, strict=True)
        },
    }


def main() -> None:
    """Print one line of JSON for each way to load."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--one", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--each", action="store_true")
    arguments = parser.parse_args()
    if arguments.one is not None:
        load(arguments.rank, arguments.ranks, arguments.one, arguments.each)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        write_model(folder / "model", arguments.layers)
        for each in (True, False):
            found = measure(folder, arguments.ranks, each)
            print(json.dumps({"whole on each rank" if each else "in shares": found}), flush=True)


if __name__ == "__main__":
    main()
