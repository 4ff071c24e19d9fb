"""What all tests share: one Ray per session, started when the first test asks for it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# set before anything imports ray: token files of the user's home must not decide what a test sees
os.environ["RAY_AUTH_MODE"] = "disabled"
_HOME = tempfile.TemporaryDirectory(prefix="raysvc-test-home-", ignore_cleanup_errors=True)  # until we end
os.environ["HOME"] = _HOME.name
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["RAY_DATA_DISABLE_PROGRESS_BARS"] = "1"
os.environ.pop("RAY_ADDRESS", None)
os.environ.pop("RAYSVC_CACHE_DIR", None)

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A local Ray of four logical CPUs."""
    import ray

    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=200 * 2**20,
        logging_level="ERROR",
        log_to_driver=False,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths of 240 chat rows and a small tokenizer, made once."""
    from raysvc.sample import chat_rows, row_texts, write_rows, write_tokenizer

    folder = tmp_path_factory.mktemp("sample")
    rows = write_rows(folder / "rows.jsonl", 240)
    tokenizer = write_tokenizer(folder / "tokenizer", row_texts(chat_rows(200)), vocab_size=512)
    return {"rows": str(rows), "tokenizer": str(tokenizer)}
