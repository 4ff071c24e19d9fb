"""`raysvc doctor`: looks for what makes runs fail later, and says what to do about each.

Always true:
- a check that cannot run is a finding of its own (`skip`, with the reason), never silence;
- every finding but `ok` and `skip` has a remedy;
- nothing is changed: the store check removes what it wrote, no Ray is started.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from raysvc.errors import RaysvcError, StoreError
from raysvc.inspect.node_checks import (
    MAX_SKEW_S,
    MIN_SHM_SHARE,
    Finding,
    State,
    check_access,
    check_answers,
    check_node_gpus,
    check_node_shm,
    check_packages,
    clock_skew,
    facts_of,
)
from raysvc.inspect.node_facts import facts_of_this_node, shared_memory
from raysvc.job.config import JobConfig
from raysvc.nodes.place import NodePlace, SharedFolder
from raysvc.nodes.room import label
from raysvc.progress import how_many

MIN_RAY = (2, 60)


def examine(job: JobConfig | None = None, address: str | None = None) -> list[Finding]:
    """All checks; those of a job or a cluster say `skip` without one.

    Args:
        job: checks its cache root, tokenizer and plan too, and its folders from every node.
        address: checks that cluster too; None: RAY_ADDRESS. A cluster that cannot be reached is a finding.
    """
    nodes, reached = _nodes(address or os.environ.get("RAY_ADDRESS"))
    return [
        check_versions(
            sys.version_info[:3], _version("ray"), [str(node.get("RayVersion", "")) for node in nodes]
        ),
        check_auth(os.environ, Path.home() / ".ray" / "auth_token"),
        reached,
        check_shm(*shared_memory()),
        _guarded("cache store", job, _check_store),
        _guarded("tokenizer", job, _check_tokenizer),
        _guarded("object store", job, lambda job: _check_plan(job, nodes)),
        _check_gpu(),
        *(_check_nodes(job, nodes) if nodes else _skipped(reached)),
    ]


def _skipped(cluster: Finding) -> list[Finding]:
    what = cluster.what if cluster.state == "skip" else "the cluster does not answer"
    return [Finding(name, "skip", what) for name in ("nodes", "clock")]


def _check_nodes(job: JobConfig | None, nodes: list[dict[str, Any]]) -> list[Finding]:
    """Returns what only the nodes can say."""
    places, findings = _places(job)
    try:
        answers, missing = facts_of(nodes, tuple(places))
    finally:
        for place in places:
            place.close()
    gpus = {label(node): float(node["Resources"].get("GPU", 0)) for node in nodes}
    device = job.trainer.device if job is not None else "auto"
    answering = [node for node in nodes if label(node) in answers]
    here = facts_of_this_node().versions
    return [
        check_answers(answers, missing),
        check_packages(answers, here),
        check_node_shm(answers),
        check_node_gpus(answers, gpus, device),
        *findings,
        *(check_access(place.name, place.url, answers) for place in places),
        check_clock_skew(clock_skew(answering))
        if answering
        else Finding("clock", "skip", "no node answered"),
    ]


def _places(job: JobConfig | None) -> tuple[list[NodePlace], list[Finding]]:
    """The folders of a job, each with a file that nodes look for; findings for those we cannot write to ourselves."""
    from raysvc.api import cache_root
    from raysvc.cache.store.open import absolute

    if job is None:
        return [], []
    urls = {"cache.root": cache_root(job), "trainer.run_dir": absolute(job.run_dir)}
    places: list[NodePlace] = []
    findings = []
    for name, url in urls.items():
        try:
            places.append(SharedFolder.open(name, url, job.cache.storage_options))
        except (OSError, StoreError) as error:
            text = error.what if isinstance(error, StoreError) else error.strerror or error
            what = f"{url}: {type(error).__name__}: {text}"
            findings.append(
                Finding(f"{name} on nodes", "fail", what, f"give {name} a place that can be written")
            )
    return places, findings


def check_versions(python: tuple[int, ...], ray: str, nodes: Iterable[str] = ()) -> Finding:
    """Python and Ray, here and on the nodes (empty texts: not known)."""
    name = "versions"
    if python < (3, 11):
        return Finding(name, "fail", f"Python {'.'.join(map(str, python))}", "use Python 3.11 or newer")
    if tuple(int(part) for part in ray.split(".")[:2]) < MIN_RAY:
        return Finding(name, "fail", f"ray {ray}", 'pip install "ray[data,default]>=2.60"')
    other = sorted({version for version in nodes if version and version != ray})
    if other:
        return Finding(
            name, "fail", f"ray {ray} here, {', '.join(other)} on nodes", "use one image for all nodes"
        )
    return Finding(name, "ok", f"Python {'.'.join(map(str, python))}, ray {ray}")


def check_auth(environment: Mapping[str, str], token_file: Path) -> Finding:
    """Checks who may use the cluster; the token itself is never looked at."""
    mode, name = environment.get("RAY_AUTH_MODE", ""), "auth"
    given = "RAY_AUTH_TOKEN" in environment or "RAY_AUTH_TOKEN_PATH" in environment
    if mode == "disabled":
        what = "RAY_AUTH_MODE=disabled: whoever reaches a port of the cluster runs code on it"
        return Finding(
            name, "warn", what, "set RAY_AUTH_MODE=token on all nodes and clients; see SECURITY.md"
        )
    if mode not in ("", "token"):
        return Finding(name, "fail", f"RAY_AUTH_MODE={mode}", "set it to token")
    if not given and not token_file.exists():
        state: State = "fail" if mode else "warn"
        return Finding(
            name, state, f"no token: {token_file} is not there", "run: ray get-auth-token --generate"
        )
    if not given and token_file.stat().st_mode & 0o077:
        return Finding(name, "warn", f"{token_file} can be read by others", f"chmod 600 {token_file}")
    if not mode:
        what = "RAY_AUTH_MODE is not set: Ray decides by whether a token file is there"
        return Finding(name, "warn", what, "set RAY_AUTH_MODE=token on all nodes and clients")
    return Finding(name, "ok", "token authentication")


def check_shm(shm_bytes: int | None, memory_bytes: int) -> Finding:
    """Returns whether Ray can keep objects in memory; None: this system has no /dev/shm."""
    name = "/dev/shm"
    if shm_bytes is None:
        return Finding(name, "skip", "not Linux: Ray keeps objects in a temporary folder")
    if shm_bytes < MIN_SHM_SHARE * memory_bytes:
        what = f"{_gb(shm_bytes)} for {_gb(memory_bytes)} of memory: Ray falls back to files on disk"
        remedy = f"give the container --shm-size={int(MIN_SHM_SHARE * memory_bytes) >> 30}g (or an emptyDir of Memory)"
        return Finding(name, "warn", what, remedy)
    return Finding(name, "ok", _gb(shm_bytes))


def check_look_ahead(need_bytes: int, store_bytes: int, steps: int) -> Finding:
    """The plan's largest steps against the smallest node's object store."""
    name, what = (
        "object store",
        f"look-ahead of {steps} steps takes {_gb(need_bytes)}, a node has {_gb(store_bytes)}",
    )
    if need_bytes > store_bytes:
        return Finding(
            name, "fail", what, "lower server.look_ahead_steps or plan.batch_size, or start Ray with more"
        )
    if need_bytes > store_bytes / 2:
        return Finding(
            name, "warn", what, "objects will be spilled when two servers share a node; lower look-ahead"
        )
    return Finding(name, "ok", what)


def check_clock_skew(skew_s: Mapping[str, float]) -> Finding:
    """Clocks of nodes against this one, seconds; garbage collection trusts them."""
    worst = max(skew_s, key=lambda node: abs(skew_s[node]))
    what = f"{len(skew_s)} nodes within {abs(skew_s[worst]):.2f} s"
    if abs(skew_s[worst]) > MAX_SKEW_S:
        return Finding(
            "clock", "warn", f"{worst} is off by {skew_s[worst]:.1f} s", "run chrony or ntpd on all nodes"
        )
    return Finding("clock", "ok", what)


def _guarded(name: str, job: JobConfig | None, check: Callable[[JobConfig], Finding]) -> Finding:
    if job is None:
        return Finding(name, "skip", "no job given (-c job.yaml)")
    try:
        return check(job)
    except (RaysvcError, OSError) as error:
        what, remedy = getattr(error, "what", str(error)), getattr(error, "remedy", "see the message")
        return Finding(name, "fail", f"{getattr(error, 'where', type(error).__name__)}: {what}", remedy)


def _check_store(job: JobConfig) -> Finding:
    from raysvc.api import cache_root
    from raysvc.cache.store.open import open_store

    store = open_store(cache_root(job), job.cache.storage_options, job.cache.unsafe_store)
    store.probe()
    if job.cache.unsafe_store:
        what = f"{store.url}: cache.unsafe_store is on"
        return Finding(
            "cache store", "warn", what, "two builders may overwrite each other; use another store"
        )
    return Finding("cache store", "ok", f"{store.url} creates a file only when it is absent")


def _check_tokenizer(job: JobConfig) -> Finding:
    from raysvc.chat.tokens.tokenizer import LoadedTokenizer

    hf = LoadedTokenizer(job.tokenizer).hf
    what = f"{job.tokenizer.name}: {len(hf)} tokens"
    if job.tokenizer.trust_remote_code:
        return Finding("tokenizer", "warn", f"{what}, runs Python code of its own", "pin tokenizer.revision")
    return Finding("tokenizer", "ok", what)


def _check_plan(job: JobConfig, nodes: list[dict[str, Any]]) -> Finding:
    from raysvc.api import cache_root, tokenize
    from raysvc.builds.job_plan import report_of
    from raysvc.builds.lookup import explain_job
    from raysvc.scoring.job_columns import with_found_columns

    if not explain_job(job, cache_root(job))["hit"]:
        return Finding("object store", "skip", "the job's entry is not built yet")
    entry, missing = with_found_columns(job, tokenize(job))
    if missing:
        return Finding("object store", "skip", f"the job's {', '.join(missing)} are not computed yet")
    report = report_of(job, entry)
    stores = [node["Resources"].get("object_store_memory", 0) for node in nodes]
    store_bytes = int(min(stores)) if stores else int(MIN_SHM_SHARE * shared_memory()[1])
    return check_look_ahead(report.bytes_look_ahead, store_bytes, job.server.look_ahead_steps)


def _check_gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("GPU", "skip", "no CUDA device here")
    try:
        torch.empty(1 << 20, dtype=torch.uint8).pin_memory()
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0]
        return Finding(
            "GPU", "fail", f"memory cannot be pinned: {first}", "raise ulimit -l, or the memory limit"
        )
    return Finding("GPU", "ok", f"{torch.cuda.device_count()} devices, memory can be pinned")


def _nodes(address: str | None) -> tuple[list[dict[str, Any]], Finding]:
    import ray

    if address is None and not ray.is_initialized():
        return [], Finding("cluster", "skip", "no cluster given (--address, RAY_ADDRESS)")
    from raysvc.cluster import connect

    try:
        connect(address)
    except RaysvcError as error:
        return [], Finding(
            "cluster", "fail", str(getattr(error, "what", error)), str(getattr(error, "remedy", ""))
        )
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return nodes, Finding(
        "cluster", "ok", f"{how_many(len(nodes), 'node')}, {ray.cluster_resources().get('CPU', 0):g} CPUs"
    )


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB"
