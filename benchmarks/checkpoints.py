"""What saving and loading a checkpoint costs, beside `torch.distributed.checkpoint`, and what of it are digests.

    python benchmarks/checkpoints.py [--repeats 7] [--folder /dev/shm]

One rank, a model of 110 M weights with the state of AdamW, 1.4 GB. Files lie in memory: the worst case for digests, which are made
while bytes are copied from there. Loads are in seconds of the processor, saves in seconds.

Figures (11-25): saving 1.4 GB takes 0.57 s of a core, `torch.distributed.checkpoint` 0.90. Digests take 0.07 s for a gigabyte: 1.24
times a load from memory without them (aim 1.05, missed), 5 % of a load from a disk of 0.7 GB/s.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != HERE]  # it has a tokenize.py

import argparse  # noqa: E402
import json  # noqa: E402
import shutil  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
import warnings  # noqa: E402
from collections import defaultdict  # noqa: E402
from collections.abc import Callable  # noqa: E402
from statistics import median  # noqa: E402
from typing import Any  # noqa: E402
from unittest import mock  # noqa: E402


class NoDigest:
    """In the place of XXH3-128: takes no time."""

    def update(self, data: memoryview) -> None:
        """Look at nothing."""

    def hexdigest(self) -> str:
        """Not compared."""
        return ""


class Anything(dict[str, str]):
    """The digests of tensors that were not looked at."""

    def __missing__(self, name: str) -> str:
        return ""


def trained() -> tuple[Any, Any]:
    """A model after one step."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from raysvc.actors.worker.adamw import PlainAdamW, decay_groups

    config = LlamaConfig(
        vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    optimizer = PlainAdamW(decay_groups(model, 0.1), lr=1e-3)
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    return model, optimizer


def main() -> None:
    """Print a table and one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", default="/dev/shm")
    arguments = parser.parse_args()
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    from raysvc.actors.model import saved_state, tensor_file
    from raysvc.actors.worker import checkpoint

    warnings.filterwarnings("ignore", "torch.distributed is")
    model, optimizer = trained()
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    ours, theirs = (Path(tempfile.mkdtemp(dir=arguments.folder)) for _ in range(2))

    def without_digests() -> None:
        digests = mock.patch.object(
            saved_state, "Digests", lambda header, _: tensor_file.Digests(header, Anything())
        )
        with digests, mock.patch.object(tensor_file.xxhash, "xxh3_128", NoDigest):
            checkpoint.load(ours, 0, model, optimizer)

    calls: dict[str, tuple[Callable[[], float], Callable[[], Any]]] = {
        "save": (time.perf_counter, lambda: checkpoint.save(ours, 0, model, optimizer, 1)),
        "save, torch": (time.perf_counter, lambda: dcp.save(state, checkpoint_id=theirs, no_dist=True)),
        "load": (time.process_time, lambda: checkpoint.load(ours, 0, model, optimizer)),
        "load without digests": (time.process_time, without_digests),
        "load, torch": (time.process_time, lambda: dcp.load(state, checkpoint_id=theirs, no_dist=True)),
    }
    took: dict[str, list[float]] = defaultdict(list)
    try:
        for _ in range(arguments.repeats):
            for name, (clock, call) in calls.items():
                if "save" in name:
                    folder = theirs if "torch" in name else ours
                    shutil.rmtree(folder)
                    folder.mkdir()
                begin = clock()
                call()
                took[name].append(clock() - begin)
    finally:
        shutil.rmtree(ours)
        shutil.rmtree(theirs)
    figures = {
        name: {"median_s": round(median(s), 3), "least_s": round(min(s), 3)} for name, s in took.items()
    }
    for name, figure in figures.items():
        print(f"{name:22} {figure['median_s']:8.3f} s, at least {figure['least_s']:.3f}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
