"""raysvc under Ray Train: rows of an entry as the shard of each worker of a TorchTrainer, on a Ray that outlives all of them.

Rank 0 runs the trainer, which dies with it; each rank shows what its worker wrote into a folder of the launch, and says there which
batch it asks for.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ray_alone import prepare as prepare
from raysvc_load import VERSION as VERSION
from raysvc_load import job_of
from words import WORDS, long_number, unpad

PROMISE = "a state is a position in an epoch's one order: other numbers of workers and batch sizes go on with exactly the rows left"
SETTINGS = "TorchTrainer(datasets=EntryData, dataset_config=EntryDataConfig), get_dataset_shard, iter_torch_batches, state_dict"
NOT_OFFERED = {
    "workers": "a thread of the worker reads ahead; there are no processes to set",
    "packed": "a batch has a row a line",
    "mixture": "a shard is one entry",
}
IMPORTS = ("torch", "ray.train.torch", "raysvc.integrations.ray_train")


def _write(path: Path, text: bytes) -> None:
    new = path.with_suffix(f".new{os.getpid()}")
    new.write_bytes(text)
    new.rename(path)


def _wait(is_there: Any) -> None:
    while not is_there():
        time.sleep(0.01)


def train(config: dict[str, Any]) -> None:
    """What each worker runs: a batch when it is asked for, with the state after it."""
    import ray.train

    rank, o, folder = ray.train.get_context().get_world_rank(), config["o"], Path(config["folder"])
    shard, number = ray.train.get_dataset_shard("train"), 0
    if config["state"]:
        shard.load_state_dict(config["state"])
    for _ in range(shard.epoch, o["epochs"]):
        for batch in shard.iter_torch_batches(batch_size=o["batch_size"]):
            rows = _rows(batch, o)
            _write(folder / f"{rank}-{number}", pickle.dumps((rows, shard.state_dict())))
            number += 1
            _wait((folder / f"{rank}-asked-{number}").exists)
    (folder / f"{rank}-{number}").touch()  # the end


def _rows(batch: Any, o: dict[str, Any]) -> list[Any]:
    if o.get("long"):
        return [*map(long_number, batch["input_ids"])]
    ids = unpad(batch)
    return ids if o.get("ids") else [row[1] - 2 for row in ids if 2 <= row[1] < WORDS + 2]


class Loader:
    save_at: int | None = None

    def __init__(self, rows: Path, o: dict[str, Any]) -> None:
        self.rows, self.o, self.state, self.given = rows, o, None, None
        self.folder = rows.parent / f"launch-{os.environ['MASTER_PORT']}"
        self.folder.mkdir(exist_ok=True)

    def _fit(self, failed: list[BaseException]) -> None:
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer

        import raysvc
        from raysvc.integrations.ray_train import EntryData, EntryDataConfig

        try:
            o = self.o
            entry = raysvc.tokenize(job_of(self.rows, o))
            data = EntryData(
                entry.uri,
                columns=["input_ids"],
                shuffle="full" if o["shuffle"] else "none",
                seed=o["seed"],
            )
            TorchTrainer(
                train,
                train_loop_config={"o": o, "folder": str(self.folder), "state": self.state},
                datasets={"train": data},
                dataset_config=EntryDataConfig(),
                scaling_config=ScalingConfig(num_workers=o["world_size"], resources_per_worker={"CPU": 0.5}),
                run_config=RunConfig(storage_path=str(self.rows.parent / "train")),
            ).fit()
        except BaseException as error:  # noqa: BLE001 - what it says is what is looked at
            failed.append(error)

    def batches(self) -> Iterator[list[Any]]:
        rank, failed, number = self.o["rank"], [], 0
        if rank == 0:
            import ray

            os.environ["PYTHONPATH"] = str(Path(__file__).parent)
            ray.init(log_to_driver=False, logging_level="ERROR")
            with contextlib.redirect_stderr(io.StringIO()):
                threading.Thread(target=self._fit, args=(failed,), daemon=True, name="fit").start()
        while True:
            path = self.folder / f"{rank}-{number}"
            _wait(lambda path=path: path.exists() or failed)
            if failed:
                raise failed[0]
            # written by a worker of this run
            if not (text := path.read_bytes()):
                break
            batch, self.given = pickle.loads(text)
            yield batch
            number += 1
            (self.folder / f"{rank}-asked-{number}").touch()
        if rank == 0:  # the trainer ends with this process; other ranks are a batch behind
            _wait(lambda: failed or not any(t.name == "fit" for t in threading.enumerate()))

    def save(self) -> Any:
        return self.given

    def load(self, state: Any) -> None:
        self.state = json.loads(json.dumps(state))


def open_loader(rows: Path, **options: Any) -> Loader:
    return Loader(rows, options)
