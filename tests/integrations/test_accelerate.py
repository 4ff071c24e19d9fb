"""`accelerate launch` with two processes; oracle: the losses of one process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from .accelerate_ranks import KILLED_AT, SAVED_EVERY

pytest.importorskip("accelerate")
pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]
SCRIPT = Path(__file__).with_name("accelerate_ranks.py")
# on CPUs alone `--cpu` starts one process, or asks for mpirun; `--multi_gpu` starts torchrun, and `use_cpu` gives gloo
TWO = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
       "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]  # fmt: skip


@pytest.mark.parametrize("kind", ["trainer", "sft"])
def test_two_processes_of_accelerate_have_the_losses_of_one_before_and_after_one_is_killed(
    kind: str, ray_session: None, tmp_path: Path, sample: dict[str, str]
) -> None:
    import ray

    import raysvc

    if kind == "sft":
        pytest.importorskip("trl")
    plan = {"batch_size": 80, "mini_batch_size": 40, "micro_batch_tokens": 1024, "epochs": 2}
    job = {
        "source": {"path": sample["rows"], "format": "chat"},
        "tokenizer": sample["tokenizer"],
        "train_on": "all_assistant_messages",
        "cache": {"root": str(tmp_path / "cache")},
        "plan": plan,
    }
    server = raysvc.serve(job, name=f"accelerate-{kind}", detached=False)
    address = ray.get_runtime_context().gcs_address

    def run(launcher: list[str], folder: str, *kill: str) -> int:
        facts = [
            kind,
            server.name,
            address,
            uuid.uuid4().hex,
            str(tmp_path / folder),
            sample["tokenizer"],
            *kill,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run([*launcher, str(SCRIPT), *facts], check=False, env=environment).returncode

    def losses(folder: str) -> list[float]:
        found: list[float] = json.loads((tmp_path / folder / "losses.json").read_text())
        return found

    assert run([sys.executable], "one") == 0
    assert run(TWO, "two", "kill") != 0
    assert not (tmp_path / "two" / "losses.json").exists()
    saved = json.loads((tmp_path / "two" / f"checkpoint-{SAVED_EVERY}" / "trainer_state.json").read_text())
    before = [line["loss"] for line in saved["log_history"]]
    shutil.copytree(tmp_path / "two", tmp_path / "fewer")
    assert run(TWO, "two") == 0
    assert run([sys.executable], "fewer") == 0, "another number of ranks, in the middle of a step"
    assert len(losses("one")) == 12 > KILLED_AT > len(before) == SAVED_EVERY
    assert before == pytest.approx(losses("one")[:SAVED_EVERY], rel=1e-5)
    assert losses("fewer") == pytest.approx(losses("one"), rel=1e-5)
    assert losses("two") == pytest.approx(losses("one"), rel=1e-5)
    assert losses("one")[-1] < losses("one")[0] - 0.05, "it learns"
