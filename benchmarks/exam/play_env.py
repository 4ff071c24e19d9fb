"""An environment of its own for each contestant, `.bench/exam-…`, which sees the project's packages behind its own."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / ".bench"
TORCH = "torch==2.13.0"  # the one that is there: no other is fetched
# those that name vLLM, CUDA or pictures as their needs are installed alone, with what their rows of text need
ALONE = {"torchtitan": ("torchdata", "tyro", "spmd_types==0.2.3", "datasets<4.8"),
         "verl": ("torchdata", "tensordict", "omegaconf", "hydra-core", "codetiming", "pyvers"),
         "skyrl==0.3.0": ("skyrl-gym", "loguru", "jaxtyping", "tensordict", "omegaconf", "hydra-core", "func_timeout",
                          "httpx", "pybase64", "cloudpathlib"),
         "axolotl": ("addict", "colorama"),
         "tinker-cookbook": ("chz", "blobfile", "pyrage"), "tinker": (), "tml-renderers": (),
         "llamafactory": ("omegaconf", "peft==0.18.1")}  # fmt: skip


def python_of(contestant: str, needs: Sequence[str]) -> str:
    """Python of a contestant's environment, made when it is not there; the project's own where it needs nothing."""
    if not needs:
        return sys.executable
    folder = BENCH / f"exam-{contestant}"
    python = folder / "bin" / "python"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "exam.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ready").exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            site = next((folder / "lib").glob("python*/site-packages"))
            (site / "zz_project.pth").write_text(
                "".join(f"{path}\n" for path in sys.path if path.endswith("site-packages"))
            )
            install = [str(python), "-m", "pip", "install", "--quiet"]
            alone = [name for name in needs if name in ALONE]
            if alone:
                subprocess.run([*install, "--no-deps", *alone], check=True)
            others = [name for name in needs if name not in ALONE] + [
                more for name in alone for more in ALONE[name]
            ]
            subprocess.run([*install, *others, TORCH], check=True)
            (folder / "ready").touch()
    return str(python)
