"""An environment for the peers of the benchmarks, `.bench/peers`: a venv that sees the project's packages behind its own.

    python benchmarks/peers.py     # make it, and print its Python

With a checkout of SkyRL it is another one, `.bench/skyrl-…`, made again when the path is another.

Always true:
- nothing is installed into the project's environment;
- an environment that is complete is used as it is, and only one process makes it.
"""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
import sysconfig
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / ".bench" / "peers"
ALONE = ("skyrl==0.3.0", "skyrl-gym", "trl", "mosaicml-streaming")
WITH_NEEDS = (
    *("loguru", "jaxtyping", "tensordict", "omegaconf", "hydra-core", "torchdata", "peft", "accelerate"),
    *("func_timeout", "httpx", "prometheus-client", "cloudpathlib", "pybase64"),
)


def peers_python(folder: Path = FOLDER, skyrl: Path | None = None) -> str:
    """Python of the peers' environment, made in `folder` when it is not there; `skyrl`: a checkout in place of 0.3.0."""
    alone = ALONE
    if skyrl is not None:
        path = str(skyrl.resolve())
        folder = folder.with_name("skyrl-" + hashlib.sha256(path.encode()).hexdigest()[:8])
        alone = (path, *ALONE[1:])
    python = folder / "bin" / "python"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "peers.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ready").exists():
            _make(folder, str(python), alone)
    return str(python)


def _make(folder: Path, python: str, alone: tuple[str, ...]) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    site = next((folder / "lib").glob("python*/site-packages"))
    (site / "zz_project.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    pip = [python, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", *alone], check=True)
    subprocess.run([*pip, *WITH_NEEDS], check=True)
    (folder / "ready").touch()


if __name__ == "__main__":
    print(peers_python())
