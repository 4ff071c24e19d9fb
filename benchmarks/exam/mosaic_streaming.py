"""mosaicml-streaming: StreamingDataset and StreamingDataLoader; ranks are one process group, as torchrun starts them."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from epochs import Epochs

VERSION = f"mosaicml-streaming {importlib.metadata.version('mosaicml-streaming')}"
PROMISE = "elastic determinism: samples come in one order whatever the number of ranks and workers, and a run resumes within an epoch"
SETTINGS = "MDS, py1e, num_canonical_nodes=1, StreamingDataLoader.state_dict; other settings are its defaults"


def open_loader(rows: Path, **o: Any) -> Epochs:
    os.environ.update(
        RANK=str(o["rank"]),
        WORLD_SIZE=str(o["world_size"]),
        LOCAL_RANK=str(o["rank"]),
        LOCAL_WORLD_SIZE=str(o["world_size"]),
    )
    _without_pictures()
    from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    folder = rows.with_suffix(".mds")
    with rows.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with MDSWriter(out=str(folder), columns={"row": "int"}) as writer:
                for line in rows.read_text().splitlines():
                    writer.write({"row": json.loads(line)["row"]})
    if o["rank"] == 0 and o["world_size"] == 1:
        clean_stale_shared_memory()  # of a process that was killed
    data = StreamingDataset(
        local=str(folder),
        shuffle=o["shuffle"],
        shuffle_seed=o["seed"],
        batch_size=o["batch_size"],
        num_canonical_nodes=1,
    )
    loader = StreamingDataLoader(data, batch_size=o["batch_size"], num_workers=o["workers"])
    return Epochs(loader, o["epochs"], lambda batch: batch["row"].reshape(-1).tolist())


def _without_pictures() -> None:
    """It imports torchvision, whose CPU build is not on PyPI, for data sets of pictures that are not tried here."""
    for name in (
        "torchvision",
        "torchvision.datasets",
        "torchvision.transforms",
        "torchvision.transforms.functional",
    ):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    sys.modules["torchvision.datasets"].VisionDataset = object  # type: ignore[attr-defined]
    sys.modules["torchvision.transforms.functional"].to_tensor = None  # type: ignore[attr-defined]
