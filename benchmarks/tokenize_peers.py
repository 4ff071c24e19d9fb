"""An environment of its own for the peers of `tokenize.py`: a venv that sees the project's packages behind its own.

Always true:
- nothing is installed into the project's environment;
- an environment that is there is used as it is.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

ALONE = ("skyrl==0.3.0", "skyrl-gym")
WITH_NEEDS = (
    *("loguru", "jaxtyping", "tensordict", "omegaconf", "hydra-core", "torchdata", "peft", "accelerate"),
    *("func_timeout", "httpx", "prometheus-client", "cloudpathlib", "pybase64"),
)


def peers_python(folder: Path) -> str:
    """Python of the peers' environment, made in `folder` when it is not there."""
    python = folder / "bin" / "python"
    if (folder / "ready").exists():
        return str(python)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    site = next((folder / "lib").glob("python*/site-packages"))
    (site / "zz_project.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", *ALONE], check=True)
    subprocess.run([*pip, *WITH_NEEDS], check=True)
    (folder / "ready").touch()
    return str(python)
