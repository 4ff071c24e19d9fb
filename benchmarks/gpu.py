"""What staging does on one CUDA device, within eight minutes. `python benchmarks/gpu.py [--out FILE] [--skip-tests]`

1. Every test marked `gpu`.
2. The share of host-to-device bytes that compute hides, for shards of 1, 50 and 500 MB, with every toggle, and whether
   the kernels that ran beside the copies saw the right bytes.
3. Seconds of a step with staging, without, and from a perfect loader: one batch that stays on the device.
4. Two colocated workers on one device that make room for each other; peak memory.

Writes one JSON file and prints a table. Ends with code 2 where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from common import show

from raysvc.actors.staging.staging import Staging, StagingOptions
from raysvc.collate.shard import Denominators, MicroBatchInfo, Shard

ROOT = Path(__file__).parents[1]
MB = 10**6
SIZES_MB = (1, 50, 500)
STEPS = {1: 64, 50: 24, 500: 8}
TOGGLES: dict[str, StagingOptions] = {
    "all on": StagingOptions(),
    "no prefetch": StagingOptions(prefetch=False),
    "no copy stream": StagingOptions(copy_stream=False),
    "no pinned memory": StagingOptions(pin_memory=False),
    "timing": StagingOptions(timing=True),
    "timing every 4th step": StagingOptions(timing=True, timing_every_steps=4),
}
TESTS_S = 240


class Machine(Protocol):
    """A device with a clock; tests bring one of their own."""

    def staging(self, options: StagingOptions) -> Staging:
        """Staging to it."""

    def kernel(self, seconds: float, look: Callable[[], None]) -> None:
        """Ask compute for a kernel, and then for `look`; returns at once."""

    def now(self) -> float:
        """Seconds, once everything asked for is done."""


class CudaMachine:
    """The first CUDA device."""

    def __init__(self) -> None:
        import torch

        self._cycles_per_s = 1e9
        begin = self.now()
        torch.cuda._sleep(200_000_000)
        self._cycles_per_s = 2e8 / (self.now() - begin)

    def staging(self, options: StagingOptions) -> Staging:
        return Staging(0, "cuda", options)

    def kernel(self, seconds: float, look: Callable[[], None]) -> None:
        import torch

        torch.cuda._sleep(int(seconds * self._cycles_per_s))
        look()

    def now(self) -> float:
        import torch

        torch.cuda.synchronize()
        return time.perf_counter()


def shard_of(nbytes: int, number: int) -> Shard:
    """One array of random bytes."""
    ids = np.random.default_rng(number).integers(0, 2**31, (1, nbytes // 4), dtype=np.int32)
    micro = (MicroBatchInfo(0, 1, nbytes // 4, 1),)
    rows = np.zeros(1, np.int64)
    return Shard(number, 0, 0, "padded_right", {"input_ids": ids}, rows, Denominators(1, 1, 1), micro)


class Seen(NamedTuple):
    """What a run of steps took, and the sums that its kernels saw."""

    seconds: float
    sums: list[Any]


def run_steps(
    machine: Machine,
    staging: Staging,
    shards: list[Shard],
    kernel_s: float,
    steps: int,
    perfect: bool = False,
) -> Seen:
    """Steps of one kernel each, their shards staged one ahead; `perfect`: one shard stays on the device."""
    sums: list[Any] = []
    staging.put((0, 0), shards[0])
    tensors = staging.take((0, 0), 60.0)[0].shard.arrays if perfect else {}
    begin = machine.now()
    for step in range(steps):
        if not perfect:
            tensors = staging.take((step, 0), 60.0)[0].shard.arrays

        def look(tensors: Any = tensors) -> None:
            sums.extend(array.long().sum() for array in tensors.values())

        if kernel_s > 0:
            machine.kernel(kernel_s, look)
        if not perfect:
            staging.release()
            if step + 1 < steps:
                staging.put((step + 1, 0), shards[(step + 1) % len(shards)])
    seconds = machine.now() - begin
    staging.release()
    return Seen(seconds, sums)


def measure_copies(machine: Machine, mb: int, steps: int) -> list[dict[str, Any]]:
    """Per toggle: the share of the copies' time that compute hides, and kernels that saw wrong bytes."""
    shards = [shard_of(mb * MB, number) for number in range(2)]
    expected = [int(shard.arrays["input_ids"].astype(np.int64).sum()) for shard in shards]
    two = StagingOptions(ring_bytes=2 * (mb * MB + 64))
    staging = machine.staging(StagingOptions())
    run_steps(machine, staging, shards, 0.0, 4)  # its slots are made
    copy_s = run_steps(machine, staging, shards, 0.0, steps).seconds / steps
    kernel_s = 2 * copy_s
    run_steps(machine, staging, shards, kernel_s, 4, perfect=True)  # and its kernels are loaded
    alone_s = run_steps(machine, staging, shards, kernel_s, steps, perfect=True).seconds
    rows = []
    for name, options in {**TOGGLES, "two slots": two}.items():
        staging = machine.staging(options)
        run_steps(machine, staging, shards, kernel_s, 4)
        both = run_steps(machine, staging, shards, kernel_s, steps)
        wrong = sum(int(total) != expected[step % 2] for step, total in enumerate(both.sums))
        hidden = 1 - (both.seconds - alone_s) / (copy_s * steps)
        rows.append(
            {
                "what": f"{mb} MB, {name}",
                "share of copies hidden": hidden,
                "copy GB/s": mb / 1e3 / copy_s,
                "kernels that saw wrong bytes": wrong,
            }
        )
    return rows


def worker_on(device: str, options: StagingOptions, size: int) -> Any:
    """The shipped worker with a Llama of two layers and width `size`."""
    from raysvc.actors.worker.torch_worker import CausalLMWorker, ModelSpec

    class Sized(CausalLMWorker):
        def load_lm(self) -> Any:
            from transformers import LlamaConfig, LlamaForCausalLM

            heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 2}
            sizes = {"hidden_size": size, "intermediate_size": 4 * size, "vocab_size": 1024}
            return LlamaForCausalLM(LlamaConfig(**sizes, **heads))

    spec = ModelSpec(
        model="tiny", vocab_size=1024, learning_rate=1e-4, weight_decay=0.0, max_grad_norm=1.0, loss="token_mean",
        seed=0, staging=options,
    )  # fmt: skip
    worker = Sized(0, 1, device, spec.model_dump_json())
    worker.setup("")
    return worker


def batch_of(number: int, rows: int, width: int) -> Shard:
    """Rows without padding, every token but the first a target."""
    ids = np.random.default_rng(number).integers(3, 1000, (rows, width), dtype=np.int32)
    labels = ids.copy()
    labels[:, 0] = -100
    each = np.arange(rows, dtype=np.int32)
    arrays = {
        "input_ids": ids,
        "labels": labels,
        "attention_mask": np.ones((rows, width), np.uint8),
        "position_ids": np.tile(np.arange(width, dtype=np.int32), (rows, 1)),
        "row_group": each,
        "row_tokens": np.full(rows, width - 1, np.int32),
        "seq_lengths": np.full(rows, width, np.int32),
    }
    counts = Denominators(rows * (width - 1), rows, rows)
    micro = (MicroBatchInfo(0, rows, width, rows * width),)
    return Shard(number, 0, 0, "padded_right", arrays, each.astype(np.int64), counts, micro)


def staged_s(worker: Any, shards: list[Shard], steps: int) -> float:
    """Seconds of a step, the next shard staged by another thread meanwhile, as Ray's concurrency group does it."""
    with ThreadPoolExecutor(1) as stager:
        stager.submit(worker.stage, (0, 0), shards[0])
        begin = time.perf_counter()
        for step in range(steps):
            ahead = stager.submit(worker.stage, (step + 1, 0), shards[(step + 1) % len(shards)])
            worker.train_step([(step, 0)])
            ahead.result()
        seconds = (time.perf_counter() - begin) / steps
        worker.clear()
        return seconds


def perfect_s(worker: Any, shard: Shard, steps: int) -> float:
    """Seconds of a step on one batch that stays where it is."""
    import torch

    weights = np.where(shard.arrays["labels"] == -100, 0, 1 / shard.denominators.tokens).astype(np.float32)
    arrays = {**shard.arrays, "loss_weights": weights}
    tensors = {name: torch.from_numpy(array).to(worker.device) for name, array in arrays.items()}
    begin = 0.0
    for step in range(-1, steps):
        if step == 0:
            begin = time.perf_counter()
        worker.micro_loss(tensors, shard.layout, None).total.backward()
        worker.optim_step()
    return (time.perf_counter() - begin) / steps


def measure_steps(device: str, rows: int, width: int, size: int, steps: int) -> list[dict[str, Any]]:
    """A step of a small model: perfect loader, staging, staging with everything off."""
    shards = [batch_of(number, rows, width) for number in range(3)]
    off = StagingOptions(prefetch=False, copy_stream=False, pin_memory=False)
    best = perfect_s(worker_on(device, StagingOptions(), size), shards[0], steps)
    out = [{"what": "step, perfect loader", "step ms": best * 1e3, "of perfect": 1.0}]
    for name, options in {"staging": StagingOptions(), "everything off": off}.items():
        worker = worker_on(device, options, size)
        staged_s(worker, shards, 3)
        seconds = staged_s(worker, shards, steps)
        out.append({"what": f"step, {name}", "step ms": seconds * 1e3, "of perfect": seconds / best})
    return out


def measure_colocated(device: str, rows: int, width: int, size: int, steps: int) -> list[dict[str, Any]]:
    """Two workers that share the device: both stay there, or each leaves before the other comes."""
    shard = batch_of(0, rows, width)
    workers = [worker_on(device, StagingOptions(), size) for _ in range(2)]
    out = []
    for offload in (False, True):
        _peak_mb(device)  # from here on
        begin = time.perf_counter()
        for step in range(steps):
            for index, worker in enumerate(workers):
                if offload:
                    for part in ("optimizer", "model"):
                        workers[1 - index].place(part, False)
                    for part in ("model", "optimizer"):
                        worker.place(part, True)
                worker.stage((step, 0), shard)
                worker.train_step([(step, 0)])
        seconds = (time.perf_counter() - begin) / (2 * steps)
        what = "two colocated workers, " + ("each leaves for the other" if offload else "both stay")
        out.append({"what": what, "step ms": seconds * 1e3, "peak MB": _peak_mb(device)})
    return out


def _peak_mb(device: str) -> float | None:
    """Device memory at most since the last call; None where there is no such count."""
    if device != "cuda":
        return None
    import torch

    peak = torch.cuda.max_memory_allocated() / 1e6
    torch.cuda.reset_peak_memory_stats()
    return float(peak)


def run_gpu_tests() -> dict[str, Any]:
    """The last line of pytest over every test marked `gpu`; a room whose libraries are missing here has none."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests", "-p", "no:cacheprovider"]
    command.append("--continue-on-collection-errors")
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TESTS_S, check=False)
    except subprocess.TimeoutExpired:
        return {"what": "tests marked gpu", "result": f"did not end within {TESTS_S} s"}
    lines = done.stdout.strip().splitlines()
    return {"what": "tests marked gpu", "exit code": done.returncode, "result": lines[-1] if lines else ""}


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", default="runs/gpu.json", help="where the JSON goes")
    parser.add_argument("--skip-tests", action="store_true", help="measure only")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("error: torch finds no CUDA device; run this on a machine that has one", file=sys.stderr)
        return 2
    rows = [] if options.skip_tests else [run_gpu_tests()]
    machine = CudaMachine()
    for mb in SIZES_MB:
        rows += measure_copies(machine, mb, STEPS[mb])
    rows += measure_steps("cuda", rows=16, width=1024, size=1024, steps=30)
    rows += measure_colocated("cuda", rows=8, width=512, size=2048, steps=5)
    show("One CUDA device", rows, device=torch.cuda.get_device_name())
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1))
    wrong = sum(row.get("kernels that saw wrong bytes", 0) for row in rows)
    failed = bool(wrong) or any(row.get("exit code", 0) != 0 for row in rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
