"""What all tests share: one Ray per session, started when the first test asks for it."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

from tests.patience import end_servers, wait_longer_for_nodes

# an example may take long beside other processes: a test that fails then has found nothing
settings.register_profile("raysvc", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("raysvc")

# set before anything imports ray: token files of the user's home must not decide what a test sees
os.environ["RAY_AUTH_MODE"] = "disabled"
# a TemporaryDirectory warns when it is collected; that warning was reported while pytest parsed another file, and
# CPython 3.11.7 then ends with "AST constructor recursion depth mismatch"
_HOME = tempfile.mkdtemp(prefix="raysvc-test-home-")
atexit.register(shutil.rmtree, _HOME, ignore_errors=True)
os.environ["HOME"] = _HOME
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["RAY_DATA_DISABLE_PROGRESS_BARS"] = "1"
# Three test processes and their Rays share one machine: what the others hold is no reason to kill a worker of this one.
os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # noqa: SIM112 - that is its name
# On a busy machine a worker needs more than the 60 s, and a head more than the 30 s, that Ray gives it.
os.environ["RAY_worker_register_timeout_seconds"] = "300"  # noqa: SIM112
os.environ["RAY_gcs_server_port_wait_time_s"] = "100"  # noqa: SIM112
os.environ.pop("RAY_ADDRESS", None)
os.environ.pop("RAYSVC_CACHE_DIR", None)

# a store waits until what it wrote is on the disk, which takes longer than all the rest of many tests
_MEMORY = Path("/dev/shm")
if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))
# beside other test processes, two threads of a tiny model wait for each other
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# a worker that is alone gives torch all cores, in its own process or the test's; its threads are to sleep while they wait
# for one that has no core, not to look again and again
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# thousands of test functions and their imports stay to the end: the collector need not look through them again and again
gc.disable()

ROOT = Path(__file__).parents[1]
_left_out = 0  # modules whose objects the collector does not look at
_resident_mb = 0  # after the last collection for the sake of memory
GROWN_MB = 256
Served = Callable[..., Any]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files whose tests use Ray most begin first: a file is one process's, and a long one at the end has nothing beside it."""
    if config.option.markexpr == "not slow":
        _try_fewer_examples(items)
    uses = Counter(item.path for item in items if "ray_session" in getattr(item, "fixturenames", ()))
    items.sort(key=lambda item: -uses[item.path])


def _try_fewer_examples(items: list[pytest.Item]) -> None:
    """The first tier tries an eighth of the examples of a test, and not fewer than five; the second tier tries all.

    Hypothesis has no public way to change the settings of a test that has some; `tests/project/test_tiers.py` holds this one.
    """
    tests = {item.function for item in items if isinstance(item, pytest.Function)}
    for test in filter(is_hypothesis_test, tests):
        full = test._hypothesis_internal_use_settings  # type: ignore[attr-defined]
        few = min(full.max_examples, max(full.max_examples // 8, 5))
        test._hypothesis_internal_use_settings = settings(full, max_examples=few)  # type: ignore[attr-defined]


def pytest_collection_finish() -> None:
    """Look for garbage among what tests make from here on, and for old garbage seldom: imports are most of what is old."""
    _leave_out_of_collections()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


def pytest_runtest_logfinish() -> None:
    """Leave out what a test imported, too: `transformers` and TRL let the collector look through all of it again and again.

    A tokenizer is a few objects to the collector, in circles that hold 47 MB of its native encoder.
    """
    global _resident_mb
    if _resident() > _resident_mb + GROWN_MB:
        gc.collect()
        _resident_mb = _resident()
    if len(sys.modules) > _left_out + 200:
        _leave_out_of_collections()


def _resident() -> int:
    """Megabytes of memory of this process; 0 where Linux does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20 if statm.is_file() else 0


def _leave_out_of_collections() -> None:
    global _left_out
    gc.freeze()
    _left_out = len(sys.modules)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A local Ray of four logical CPUs, without the processes that read logs for a driver and that ask for more nodes."""
    import ray
    from ray._private.node import Node

    wait_longer_for_nodes()
    with pytest.MonkeyPatch.context() as patch:
        for unused in ("start_log_monitor", "start_monitor"):
            patch.setattr(Node, unused, lambda _: None)
        for left in (2, 1, 0):  # a head may not be up in its time all the same
            try:
                ray.init(
                    address="local",
                    num_cpus=4,
                    include_dashboard=False,
                    object_store_memory=200 * 2**20,
                    logging_level="ERROR",
                    log_to_driver=False,
                )
                break
            except Exception:  # Ray's own, bare
                if not left:
                    raise
                ray.shutdown()
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths of 240 chat rows and a small tokenizer, made once."""
    from raysvc.cli.sample_data import chat_rows, row_texts, write_rows, write_tokenizer

    folder = tmp_path_factory.mktemp("sample")
    rows = write_rows(folder / "rows.jsonl", 240)
    tokenizer = write_tokenizer(folder / "tokenizer", row_texts(chat_rows(200)), vocab_size=512)
    return {"rows": str(rows), "tokenizer": str(tokenizer)}


def write_entry(root: Path, num_rows: int, *, per_part: int = 1000, tokens: int = 12, seed: int = 0) -> str:
    """An entry whose row r begins with the token 1000 + r; returns its uri."""
    from raysvc.cache.key import cache_key
    from raysvc.cache.store.open import open_store
    from raysvc.cache.writer import EntryWriter

    rng = np.random.default_rng(seed)
    rows = [
        [1000 + row, *rng.integers(3, 999, int(rng.integers(2, 2 * tokens))).tolist()]
        for row in range(num_rows)
    ]
    table = pa.table(
        {
            "input_ids": pa.array(rows, pa.list_(pa.int32())),
            "loss_mask": pa.array([[0] + [1] * (len(row) - 1) for row in rows], pa.list_(pa.uint8())),
            "source_row": pa.array(np.arange(num_rows)),
        }
    )
    recipe = {"rows": num_rows, "tokens": tokens, "seed": seed, "per_part": per_part}
    writer = EntryWriter(open_store(str(root)), cache_key(recipe))
    parts = [
        writer.write_part(number, table.slice(first, per_part), {})
        for number, first in enumerate(range(0, num_rows, per_part))
    ]
    writer.commit(parts, recipe, {"vocab_size": 2000, "pad_token_id": 0})
    return writer.uri


@pytest.fixture
def entry(tmp_path: Path) -> Callable[..., str]:
    """Makes an entry of so many rows."""

    def make(num_rows: int, **options: Any) -> str:
        return write_entry(tmp_path / "cache", num_rows, **options)

    return make


@pytest.fixture
def serve(tmp_path: Path, entry: Callable[..., str], ray_session: None) -> Iterator[Served]:
    """Starts a server of an entry; `plan` and fields of `ServeSpec` as arguments. Ends them all."""
    from raysvc.actors.launch import start_server
    from raysvc.actors.server.spec import ServeSpec
    from raysvc.job.config import PlanConfig

    started: list[str] = []

    def start(name: str, num_rows: int = 50, plan: dict[str, Any] | None = None, **fields: Any) -> Any:
        config = PlanConfig(**{"batch_size": 8, "mini_batch_size": 4, "epochs": 3, **(plan or {})})
        sources = fields.pop("sources", None) or [entry(num_rows)]
        journal = fields.pop("journal", str(tmp_path / f"journal-{name}"))
        spec = ServeSpec(
            name=name, sources=sources, plan=config, pad_token_id=0, journal=journal, num_cpus=0, **fields
        )
        started.append(name)
        return start_server(spec, detached=True)

    yield start
    end_servers(started)


@pytest.fixture(scope="session")
def streams() -> Any:
    """Helpers of `client/streams.py`."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("streams", Path(__file__).parent / "client" / "streams.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Any]:
    """A real S3 over HTTP, as the tests of the cache have it."""
    import importlib.util

    path = Path(__file__).parent / "cache" / "servers.py"
    spec = importlib.util.spec_from_file_location("s3_servers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["s3_servers"] = module
    spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        if (given := module.given_server()) is not None:
            yield given
            return
        with module.moto_server() as server:
            yield server
