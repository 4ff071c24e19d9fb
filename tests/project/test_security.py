"""What SECURITY.md promises, with hostile input."""

from __future__ import annotations

import ast
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from raysvc.cache.key import cache_key, canonical_json
from raysvc.cache.manifest import Manifest, Receipt
from raysvc.cache.part_info import PartInfo
from raysvc.errors import ConfigError, EntryError, RaysvcError
from raysvc.job.config import JobConfig, ServerConfig, TextSpec, TokenizerConfig
from raysvc.job.job_file import load_job

ROOT = Path(__file__).parents[2]
SECRET = "hush-7f3a91"
PART = PartInfo("part-00000-0123456789abcdef.arrow", 10, 100, 4096, "0" * 32, 64, "1" * 32)
COLUMNS = {"input_ids": "list<int32>", "loss_mask": "list<uint8>"}
MANIFEST = Manifest(cache_key({"a": 1}), (PART,), COLUMNS, {"a": 1}, {"row_counts": {}})
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)


def sealed(fields: dict[str, Any]) -> bytes:
    """What somebody writes who knows how the checksum is made."""
    fields = {name: value for name, value in fields.items() if name != "sha256"}
    return canonical_json({**fields, "sha256": hashlib.sha256(canonical_json(fields)).hexdigest()})


def code_files() -> list[Path]:
    return [
        path for room in ("raysvc", "actors", "pipelines") for path in sorted((ROOT / room).rglob("*.py"))
    ]


UNPICKLERS = {
    "pickle",
    "cloudpickle",
    "ray.cloudpickle",
    "dill",
    "shelve",
    "marshal",
    "joblib",
    "torch.package",
    "torch.jit",
}
UNPICKLERS |= {
    "torch.distributed.checkpoint"
}  # its reader unpickles `.metadata`, its planner what is no tensor
HARMLESS = {"torch.distributed.checkpoint.state_dict"}  # what is in memory, by names that no wrapper changes
CALLS = {
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "os.system",
    "torch.jit.load",
    "torch.hub.load",
    "torch.package",
}
CALLS |= {
    "pandas.read_pickle",
    "pd.read_pickle",
    "pa.deserialize",
    "numpy.fromregex",
    "pickle.load",
    "pickle.loads",
}


def imported(node: ast.AST) -> set[str]:
    """Dotted names that a statement brings in."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module:
        return {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return set()


def unsafe(code: str, *, may_execute: bool = False) -> list[str]:
    """What in a file could run what somebody stored."""
    found = []
    for node in ast.walk(ast.parse(code)):
        for name in imported(node):
            inside = name in UNPICKLERS or any(name.startswith(f"{module}.") for module in UNPICKLERS)
            if inside and not any(name == good or name.startswith(f"{good}.") for good in HARMLESS):
                found.append(f"import {name}")
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            words = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if called in CALLS or called.endswith((".read_pickle", "cloudpickle.loads", "cloudpickle.load")):
                found.append(called)
            if called in ("exec", "eval") and not may_execute:
                found.append(called)
            if (
                called.split(".")[-1] == "load"
                and called.startswith("torch.")
                and words.get("weights_only") != "True"
            ):
                found.append(called)
            found += [name for name in ("allow_pickle", "shell") if words.get(name, "False") != "False"]
    return found


@pytest.mark.parametrize(
    "code",
    [
        "import pickle", "from ray import cloudpickle", "import ray.cloudpickle as p", "torch.load(path)",
        "torch.load(path, weights_only=False)", "import torch.distributed.checkpoint as dcp",
        "from torch.distributed.checkpoint import FileSystemReader", "from torch.distributed import checkpoint",
        "from torch.distributed.checkpoint.filesystem import FileSystemReader", "np.load(p, allow_pickle=True)",
        "np.load(p, allow_pickle=flag)", "ray.cloudpickle.loads(data)", "pd.read_pickle(p)", "yaml.load(text)",
        "eval(text)", "subprocess.run(line, shell=True)", "import joblib", "torch.jit.load(path)",
    ],
)  # fmt: skip
def test_the_guard_sees_what_unpickles_or_runs(code: str) -> None:
    assert unsafe(code), code


def test_nothing_that_is_read_from_storage_can_run() -> None:
    """No pickle, no reader of torch that has one inside, no unsafe YAML, no array file with objects; `exec` and `eval` only of code that is made of a template's operations."""
    found = {str(path): unsafe(path.read_text(), may_execute="chat" in path.parts) for path in code_files()}
    assert {path: what for path, what in found.items() if what} == {}


@settings(max_examples=200)
@given(
    st.sampled_from(["key", "parts", "columns", "recipe", "report", "num_rows", "format", "readable_since"]),
    JSON,
)
def test_a_hostile_manifest_with_a_right_checksum_is_refused_or_harmless(field: str, value: Any) -> None:
    raw = {**json.loads(MANIFEST.to_json()), field: value}
    try:
        data = sealed(raw)
    except (ValueError, TypeError):
        return  # not JSON
    try:
        manifest = Manifest.from_json(data, "x")
    except EntryError:
        return
    assert all(part.name == Path(part.name).name for part in manifest.parts)


@settings(max_examples=100)
@given(st.sampled_from(list(PartInfo.__dataclass_fields__)), JSON)
def test_a_hostile_receipt_is_refused_or_harmless(field: str, value: Any) -> None:
    raw = json.loads(Receipt(0, PART, MANIFEST.columns).to_json())
    raw["part"][field] = value
    try:
        data = sealed(raw)
    except (ValueError, TypeError):
        return
    try:
        receipt = Receipt.from_json(data, "x")
    except EntryError:
        return
    assert receipt.part.name == PART.name


@pytest.mark.parametrize(
    "name", ["../part-00000-0123456789abcdef.arrow", "/etc/passwd", "a/b", "..", "", "part.arrow"]
)
def test_a_part_cannot_lie_outside_its_entry(name: str) -> None:
    raw = json.loads(MANIFEST.to_json())
    raw["parts"][0]["name"] = name
    with pytest.raises(EntryError, match="not the name of a part"):
        Manifest.from_json(sealed(raw), "x")


@pytest.fixture(scope="module")
def part_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, PartInfo]:
    from raysvc.cache.store.open import open_store
    from raysvc.cache.writer import EntryWriter

    root = tmp_path_factory.mktemp("parts")
    table = pa.table(
        {
            "input_ids": pa.array([[1, 2, 3], [4]], pa.list_(pa.int32())),
            "loss_mask": pa.array([[0, 1, 1], [1]], pa.list_(pa.uint8())),
            "source_row": pa.array([0, 1], pa.int64()),
        }
    )
    receipt = EntryWriter(open_store(str(root)), "ab" * 32).write_part(0, table, {})
    return next(root.rglob(receipt.part.name)).read_bytes(), receipt.part


@settings(max_examples=150)
@given(data=st.data())
def test_a_hostile_part_ends_in_a_typed_error(part_file: tuple[bytes, PartInfo], data: st.DataObject) -> None:
    """With the size right: whoever can write the part can write the manifest's checksum too."""
    from raysvc.cache.parts import decode_part

    good, info = part_file
    bad = bytearray(good)
    for place in data.draw(st.lists(st.integers(0, len(good) - 1), min_size=1, max_size=8)):
        bad[place] = data.draw(st.integers(0, 255))
    try:
        view = decode_part(pa.py_buffer(bytes(bad)), info, "x", checked=True)
    except EntryError:
        return
    assert view.table.num_rows == info.num_rows


LINE = st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()) | st.builds(
    lambda messages: json.dumps({"messages": messages}).encode(), JSON
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(sample: dict[str, str]) -> Any:
    from raysvc.chat.slice_tokenizer import SliceTokenizer

    return SliceTokenizer(TextSpec(format="chat", tokenizer=TokenizerConfig(name=sample["tokenizer"])))


@settings(max_examples=100)
@given(lines=st.lists(LINE, min_size=1, max_size=6))
def test_hostile_rows_are_set_aside_and_the_row_counts_balance(tokenizer: Any, lines: list[bytes]) -> None:
    good = b'{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}'
    lines = [line.replace(b"\n", b" ").replace(b"\r", b" ") for line in lines]
    try:
        result = tokenizer.run_json_lines(b"\n".join([*lines, good]) + b"\n", 0)
    except RaysvcError:
        return
    result.row_counts.check()
    assert result.row_counts.rows_written >= 1
    assert result.table.num_rows == result.row_counts.rows_written


@pytest.mark.parametrize("name", ["../x", "a/b", "", "a b", "-x", "x" * 101, "é"])
def test_a_server_name_stays_in_its_namespace(name: str) -> None:
    with pytest.raises(ValidationError):
        ServerConfig(name=name)


def job(sample: dict[str, str], folder: Path) -> dict[str, Any]:
    return {
        "source": {"path": sample["rows"], "format": "chat", "storage_options": {"secret": SECRET}},
        "tokenizer": sample["tokenizer"],
        "cache": {"root": str(folder / "cache"), "storage_options": {"secret": SECRET}},
        "plan": {"batch_size": 16, "micro_batch_tokens": 1024},
        "server": {"name": "silent"},
        "trainer": {"run_dir": str(folder / "run")},
    }


def test_credentials_are_in_no_repr_and_no_message(sample: dict[str, str], tmp_path: Path) -> None:
    config = JobConfig.model_validate(job(sample, tmp_path))
    assert SECRET not in repr(config) + str(config)
    wrong = job(sample, tmp_path)
    wrong["cache"]["storage_options"] = f"key={SECRET}"
    broken = tmp_path / "job.yaml"
    broken.write_text(f"cache: {{storage_options: {{secret: {SECRET}}}\nsource: [\n")
    address = f"s3://me:{SECRET}@host/bucket"
    for hostile in (
        wrong,
        broken,
        {**wrong, "cache": {"root": address}},
        {**wrong, "source": {"path": [address]}},
    ):
        with pytest.raises(ConfigError) as raised:
            load_job(hostile)
        assert SECRET not in str(raised.value)


@pytest.mark.ray
def test_credentials_reach_no_file_no_log_and_no_error(
    sample: dict[str, str], tmp_path: Path, ray_session: None, caplog: pytest.LogCaptureFixture
) -> None:
    import raysvc
    from raysvc.actors.launch import stop_server
    from raysvc.errors import ServerError
    from raysvc.inspect.servers import list_servers

    caplog.set_level(logging.DEBUG, logger="raysvc")
    config = job(sample, tmp_path)
    entry = raysvc.tokenize(config)
    server = raysvc.serve(config)
    assert SECRET not in repr(server) + repr(entry) + repr(list_servers())
    other = {**config, "cache": {**config["cache"], "storage_options": {"secret": SECRET, "more": SECRET}}}
    with pytest.raises(ServerError) as raised:
        raysvc.serve(other)
    assert SECRET not in str(raised.value)
    with raysvc.attach("silent") as client:
        client.commit(next(iter(client)).index)
    stop_server("silent")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 3
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert SECRET not in caplog.text


def test_code_of_a_tokenizer_runs_only_when_it_is_said_so_and_the_entry_remembers(
    sample: dict[str, str],
) -> None:
    assert TokenizerConfig(name="x").trust_remote_code is False
    recorded = TokenizerConfig(name="x", trust_remote_code=True).model_dump()
    assert recorded["trust_remote_code"] is True
    uses = [path for path in code_files() if "trust_remote_code=True" in path.read_text()]
    assert uses == [], "the flag is passed on, never set"
