"""Where the files are, and the schemas of KubeRay when this machine has them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def deploy() -> Path:
    return ROOT / "deploy"


@pytest.fixture(scope="session")
def crds() -> dict[tuple[str, str], dict[str, Any]]:
    """(apiVersion, kind) -> JSON schema of Ray's custom resources; the files are too large to keep here."""
    shared = Path(os.environ.get("RAYSVC_SHARED", ROOT.parent / "shared"))
    folder = Path(os.environ.get("RAYSVC_KUBERAY_CRDS", shared / "lab" / "kuberay"))
    files = sorted(folder.glob("*.yaml"))
    if not files:
        pytest.skip(f"no KubeRay CRDs in {folder}; set RAYSVC_KUBERAY_CRDS")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found = {}
    for file in files:
        definition = yaml.load(file.read_text(), loader)
        group, kind = definition["spec"]["group"], definition["spec"]["names"]["kind"]
        for version in definition["spec"]["versions"]:
            found[f"{group}/{version['name']}", kind] = version["schema"]["openAPIV3Schema"]
    return found
