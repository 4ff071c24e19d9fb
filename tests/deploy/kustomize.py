"""What `kubectl apply -k` would send."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml


def rendered(folder: Path) -> list[Any]:
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def all_components(deploy: Path, folder: Path) -> Path:
    """A copy of the example, in `folder`, whose lines for components are all in force."""
    shutil.copytree(deploy / "kuberay", folder / "kuberay")
    overlay = folder / "kuberay" / "overlays" / "example"
    file = overlay / "kustomization.yaml"
    file.write_text(file.read_text().replace("  # - ../../components", "  - ../../components"))
    return overlay
