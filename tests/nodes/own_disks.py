"""Run by test_own_disks.py: a cluster on this machine whose second node has a disk of its own at one folder.

Usage: own_disks.py ROWS TOKENIZER FOLDER; prints one JSON object. FOLDER/own is another disk on that node, FOLDER/shared is not.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from tests.patience import wait_longer_for_nodes

STORE = 80 << 20
JOIN = """
mount -t tmpfs raysvc-test "$1" || exit 7
exec "$2" -m ray.scripts.scripts start --address="$3" --num-cpus=2 --object-store-memory=83886080 \
  --labels=zone=far --block --disable-usage-stats
"""


def join(folder: str, address: str) -> subprocess.Popen[bytes]:
    """A node in namespaces of its own: of mounts and of processes."""
    command = [
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "bash",
        "-c",
        JOIN,
        "node",
        folder,
        sys.executable,
        address,
    ]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def refusal(call: Callable[..., Any], *arguments: Any, **options: Any) -> dict[str, Any]:
    began = time.monotonic()
    try:
        result = call(*arguments, **options)
        told = getattr(result, "num_rows", "fine")
    except Exception as error:  # noqa: BLE001 - the test looks at it
        told = f"{type(error).__name__}: {error}"
    return {"told": told, "seconds": round(time.monotonic() - began, 2)}


def by_cli(job: dict[str, Any], path: str, address: str) -> dict[str, Any]:
    """What a terminal shows of a build."""
    Path(path).write_text(json.dumps(job))
    command = [sys.executable, "-m", "raysvc.cli", "tokenize", "-c", path, "--address", address]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    return {"code": done.returncode, "lines": (done.stdout + done.stderr).splitlines()}


def save_model(path: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes)).save_pretrained(path)


def main(rows: str, tokenizer: str, folder: str) -> dict[str, Any]:
    import raysvc
    from raysvc.training.train import train

    own, shared = f"{folder}/own", f"{folder}/shared"
    for each in (own, shared):
        Path(each).mkdir()
    shutil.copy(rows, f"{own}/rows.jsonl")
    shutil.copy(rows, f"{shared}/rows.jsonl")
    shutil.copytree(tokenizer, f"{own}/tokenizer")
    shutil.copytree(tokenizer, f"{shared}/tokenizer")
    wait_longer_for_nodes()
    head = {"num_cpus": 1, "object_store_memory": STORE, "labels": {"zone": "near"}}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    node = join(own, cluster.address)
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        until = time.monotonic() + 200
        while len([one for one in ray.nodes() if one["Alive"]]) < 2 and time.monotonic() < until:
            time.sleep(0.1)

        def job(**places: str) -> dict[str, Any]:
            at = {"root": shared, "rows": shared, "tokenizer": shared, "run": shared, **places}
            return {
                "source": {"path": f"{at['rows']}/rows.jsonl", "format": "chat"},
                "tokenizer": f"{at['tokenizer']}/tokenizer",
                "cache": {"root": f"{at['root']}/cache"},
                "workers": {"min": 2, "slice_mb": 0.01},
                "plan": {"batch_size": 16},
                "server": {"name": f"s{time.time_ns()}"},
                "trainer": {"device": "cpu", "max_steps": 1, "run_dir": f"{at['run']}/run"},
            }

        told = {
            place: refusal(raysvc.tokenize, job(**{place: own})) for place in ("root", "rows", "tokenizer")
        }
        told["serve"] = refusal(raysvc.serve, job(run=own), detached=False)
        told["train"] = refusal(train, job(run=own))
        held_out = {"evals": {"held": {"source": {"path": f"{own}/rows.jsonl", "format": "chat"}}}}
        told["evals"] = refusal(raysvc.tokenize, {**job(), **held_out})
        told["rollouts"] = refusal(
            raysvc.serve_rollouts, "groups", run_dir=f"{own}/rl", pad_token_id=0, plan={"batch_size": 1},
            max_staleness=None, detached=False,
        )  # fmt: skip
        told["labels"] = refusal(
            raysvc.tokenize, {**job(), "workers": {"min": 2, "label_selector": {"zone": "mars"}}}
        )
        told["built"] = sorted(str(path) for path in Path(folder).rglob("*.arrow"))
        told["shared"] = refusal(raysvc.tokenize, job())
        save_model(f"{own}/model")
        enriched = {"enrich": {"ref_logprobs": {"model": f"{own}/model"}}}
        told["model"] = refusal(raysvc.enrich, {**job(), **enriched})
        told["cli"] = by_cli(
            {**job(rows=own), "cache": {"root": f"{shared}/cache", "force": True}},
            f"{folder}/job.json",
            cluster.address,
        )
        told["left"] = sorted(str(path) for path in Path(folder).rglob(".probe-*"))
        from raysvc.job.job_file import load_job
        from raysvc.nodes.job_nodes import ready_to_train

        task = ray.remote(num_cpus=1)(lambda: None)
        ray.get([task.remote() for _ in range(2)])
        told["task"] = refusal(ray.get, [task.remote() for _ in range(2)])
        told["warm"] = refusal(ready_to_train, load_job(job()))
        return told
    finally:
        node.kill()  # and all of its namespace
        node.wait()
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])), flush=True)
    os._exit(0)
