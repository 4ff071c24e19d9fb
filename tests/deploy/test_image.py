"""The image's own environment, made from the lines of the Dockerfile: it holds what the deploy files call."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

IMPORTS = (
    "ray.autoscaler._private.aws.node_provider", "ray.autoscaler._private.gcp.node_provider",
    "s3fs", "gcsfs", "PIL", "av", "accelerate", "gigatoken", "raysvc",
)  # fmt: skip
PROGRAMS = {"ssh": "openssh-client", "rsync": "rsync", "wget": "wget"}


def runs(deploy: Path) -> list[str]:
    """Shell commands of the last stage."""
    text = (deploy / "Dockerfile").read_text().replace("\\\n", " ")
    return re.findall(r"^RUN (.*)", text.rsplit("\nFROM ", 1)[1], re.MULTILINE)


def test_the_image_asks_debian_for_what_is_called_in_it(deploy: Path) -> None:
    (install,) = [run for run in runs(deploy) if "apt-get install" in run]
    assert set(PROGRAMS.values()) <= set(install.split())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_image_s_environment_imports_what_the_launcher_and_the_jobs_need(
    deploy: Path, tmp_path: Path
) -> None:
    root = deploy.parent
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    tree = tmp_path / "tree"  # a build leaves its folders beside the sources
    for name in ("raysvc", "actors", "pipelines"):
        shutil.copytree(root / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, tree / name)
    wheel = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path / "dist", tree]
    subprocess.run(wheel, check=True, capture_output=True)
    bin_path = tmp_path / "env" / "bin"
    for run in runs(deploy):
        for command in run.split("&&"):
            if "pip install" in command:
                line = command.replace("/tmp/constraints.txt", str(root / "constraints.txt"))
                line = re.sub(
                    r'--index-url "[^"]*"', "", line
                )  # the index of CPU builds: here the default has them
                built = next((tmp_path / "dist").glob("*.whl"))
                line = f"set -- {shlex.quote(str(built))}; {bin_path}/{line.strip()} --quiet"
                subprocess.run(["sh", "-e", "-c", line], check=True)
    for module in IMPORTS:
        done = subprocess.run(
            [bin_path / "python", "-c", f"import {module}"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{module}: {done.stderr[-400:]}"
    done = subprocess.run([bin_path / "raysvc", "--help"], capture_output=True, text=True, check=False)
    assert "tokenize" in done.stdout
