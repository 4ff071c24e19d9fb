"""Jobs on a cluster that asks for a token: submitted with the code in the job, and attached to from elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
RAY = str(Path(sys.executable).parent / "ray")
STARTS = 3  # tries to start a head


@dataclass(frozen=True)
class Head:
    """A head of its own: own home, own token, own ports."""

    address: str
    dashboard: str
    env: dict[str, str]

    def submit(
        self, *arguments: str, cwd: Path, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """`ray job submit`, as soon as the head takes jobs: its dashboard answers before its agent has started."""
        command = [RAY, "job", "submit", "--address", self.dashboard, *arguments]
        until = time.monotonic() + 120
        while True:
            done = subprocess.run(
                command,
                cwd=cwd,
                env=env or self.env,
                capture_output=True,
                text=True,
                check=False,
                timeout=280,
            )
            if "No available agent" not in done.stderr or time.monotonic() > until:
                return done

    def servers(self) -> list[str]:
        """Names of the servers of the cluster, as `raysvc ps` of another process sees them."""
        command = [sys.executable, "-m", "raysvc.cli", "ps", "--address", self.address, "--json"]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, check=True, timeout=280)
        return [server["name"] for server in json.loads(done.stdout.splitlines()[-1])["servers"]]


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    home = tmp_path_factory.mktemp("home")
    env = {
        **os.environ,
        "HOME": str(home),
        "RAY_AUTH_MODE": "token",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    env.pop("PYTHONPATH", None)  # it would win over the code that a job brings
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    made = subprocess.run(
        [RAY, "get-auth-token", "--generate"], env=env, capture_output=True, text=True, check=True
    )
    assert made.stdout.strip()
    for others in reversed(range(STARTS)):
        # own folder, with a short name for its sockets: /tmp/ray holds one "current cluster" for the whole machine
        own = tempfile.mkdtemp(prefix="rj", dir="/tmp")
        port, dashboard, client = free_ports(3)
        command = [
            RAY, "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=2",
            "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}",
            "--object-store-memory=150000000", "--disable-usage-stats", "--dashboard-agent-listen-port=0",
        ]  # fmt: skip
        said = Path(own, "said")
        found = Head(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}", {**env, "RAY_TMPDIR": own})
        with said.open("wb") as out:
            process = subprocess.Popen(command, env=found.env, stdout=out, stderr=out, start_new_session=True)
        try:
            if (
                not wait_for_start(process, said)
                and others
                and "timed out during startup" in said.read_text()
            ):
                continue
            wait_for_dashboard(found, process, said)
            yield found
            assert process.poll() is None, f"the head ended: {last_words(Path(own))}"
            return
        finally:
            # at once: asked politely, `ray start` takes a minute over the actors that are left; workers follow their raylet
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=60)
            shutil.rmtree(own, ignore_errors=True)


def wait_for_start(process: subprocess.Popen[bytes], said: Path) -> bool:
    """Whether the head starts. `ray start` gives its node 30 s, which no setting changes: a busy machine needs more, though
    the dashboard may answer before."""
    while process.poll() is None:
        if "Ray runtime started" in said.read_text():
            return True
        time.sleep(0.2)
    return False


def last_words(folder: Path) -> str:
    """The last lines of a head's node and of what it starts."""
    names = ("raylet.out", "raylet.err", "gcs_server.out", "dashboard.log", "dashboard_agent.log")
    logs = sorted(path for name in names for path in folder.glob(f"**/session_2*/logs/{name}"))
    return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-2000:]}" for path in logs)


def wait_for_dashboard(head: Head, process: subprocess.Popen[bytes], said: Path) -> None:
    until = time.monotonic() + 240
    token = (Path(head.env["HOME"]) / ".ray" / "auth_token").read_text().strip()
    ask = urllib.request.Request(f"{head.dashboard}/api/jobs/", headers={"Authorization": f"Bearer {token}"})
    while time.monotonic() < until:
        assert process.poll() is None, f"ray start ended: {said.read_text()[-2000:]}"
        try:
            urllib.request.urlopen(ask, timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
    raise AssertionError("no dashboard after four minutes")


def write_job(folder: Path, sample: dict[str, str], cache: Path, name: str, **sections: object) -> None:
    job = {
        "source": {"path": sample["rows"], "format": "chat"},
        "tokenizer": sample["tokenizer"],
        "cache": {"root": str(cache)},
        "plan": {"batch_size": 16, "micro_batch_tokens": 1024},
        "server": {"name": name, "num_cpus": 0.2},
        "trainer": {"max_steps": 2, "cpus_per_worker": 0.2, "run_dir": str(cache.parent / name)},
        **sections,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.yaml").write_text(yaml.safe_dump(job))


def last_json(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    line = [line for line in done.stdout.splitlines() if line.startswith("{")][-1]
    found: dict[str, object] = json.loads(line)
    return found


def test_whoever_has_no_token_is_refused(head: Head, tmp_path: Path) -> None:
    stranger = {**head.env, "HOME": str(tmp_path), "RAY_AUTH_MODE": "disabled"}
    done = head.submit("--", "echo", "hello", cwd=tmp_path, env=stranger)
    assert done.returncode != 0
    assert "hello" not in done.stdout


def wheel(folder: Path) -> Path:
    """A wheel of this tree, from a copy: building leaves nothing behind."""
    tree = folder / "tree"
    for room in ("raysvc", "actors", "pipelines"):
        shutil.copytree(ROOT / room, tree / room, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tree / file)
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--wheel",
        "--outdir",
        str(folder / "dist"),
        str(tree),
    ]
    subprocess.run(command, capture_output=True, check=True)
    (found,) = (folder / "dist").glob("*.whl")
    return found


RUNS = """
import raysvc
from raysvc.cli.main import main
print("code from the job" if "runtime_resources" in raysvc.__file__ else raysvc.__file__, flush=True)
main()
"""


def test_a_build_and_a_training_run_as_jobs_with_code_from_a_wheel_and_from_a_folder(
    head: Head, tmp_path: Path, sample: dict[str, str]
) -> None:
    folder = tmp_path / "job"
    write_job(folder, sample, tmp_path / "cache", "submitted")
    code = wheel(tmp_path)
    assert "raysvc/actors/launch.py" in zipfile.ZipFile(code).namelist()
    (folder / "run.py").write_text(RUNS)
    shutil.copy(code, folder)
    # as py_modules Ray would fetch torch and all else that the wheel needs; the nodes have these
    pip = {
        "packages": [f"${{RAY_RUNTIME_ENV_CREATE_WORKING_DIR}}/{code.name}"],
        "pip_install_options": ["--no-index", "--no-deps", "--force-reinstall"],
        "pip_check": False,
    }
    env = json.dumps({"pip": pip})
    command = ("--", "python", "run.py", "tokenize", "-c", "job.yaml", "--json")
    built = head.submit("--working-dir", ".", "--runtime-env-json", env, *command, cwd=folder)
    assert last_json(built)["cache"]["hit"] is False  # type: ignore[index]
    assert "code from the job" in built.stdout

    # the same, the package's folder instead of its wheel
    env = json.dumps({"py_modules": [str(ROOT / "raysvc")]})
    command = ("--", "python", "run.py", "train", "-c", "job.yaml", "--json")
    done = head.submit("--working-dir", ".", "--runtime-env-json", env, *command, cwd=folder)
    assert "code from the job" in done.stdout
    trained = last_json(done)
    assert trained["cache"]["hit"] is True  # type: ignore[index]
    assert trained["steps"] == 2


DIES = """
import os, raysvc
raysvc.serve("job.yaml", name="gone", detached=False)
raysvc.serve("job.yaml", name="kept", detached=True)
print("serving", flush=True)
os.kill(os.getpid(), 9)
"""

ATTACHES = """
import pipelines, raysvc
assert pipelines.MINE
with raysvc.attach("kept", dp_size=1) as client:
    step = next(iter(client))
    client.commit(step.index)
    print('{"rows": %d}' % len(step.mini_batches[0].info.row_ids), flush=True)
"""


def test_a_job_that_dies_leaves_only_the_server_that_it_was_asked_to_and_another_job_attaches_to_it(
    head: Head, tmp_path: Path, sample: dict[str, str]
) -> None:
    folder = tmp_path / "dies"
    write_job(folder, sample, tmp_path / "cache", "unused")
    (folder / "serve.py").write_text(DIES)
    done = head.submit("--working-dir", ".", "--", "python", "serve.py", cwd=folder)
    assert done.returncode != 0
    assert "serving" in done.stdout, done.stdout[-3000:]
    until = time.monotonic() + 120  # Ray ends what belongs to a job some time after the job
    while (found := head.servers()) != ["kept"] and time.monotonic() < until:
        time.sleep(0.2)
    assert found == ["kept"], "neither that of this job nor one of the training run before"

    # a user's project with a `pipelines` package of its own
    project = tmp_path / "project"
    (project / "pipelines").mkdir(parents=True)
    (project / "pipelines" / "__init__.py").write_text("MINE = True\n")
    (project / "attach.py").write_text(ATTACHES)
    done = head.submit("--working-dir", ".", "--", "python", "attach.py", cwd=project)
    assert last_json(done) == {"rows": 16}
