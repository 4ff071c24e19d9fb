"""`raysvc top --web`: who is answered, what a browser shows, and builds of a real cluster."""

from __future__ import annotations

import re
import shutil
import socket
import struct
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raysvc.inspect.clusters import joined
from raysvc.inspect.live import Line, cells_of
from raysvc.inspect.run_logs import RunLogs
from raysvc.report.live_page import page_server
from raysvc.report.run_charts import run_charts

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LINE = Line(
    "<b>sft</b>", "held", "host:1", "0.1.0", 3, 15, stall=0.95, stall_s=9.5, loss=1.5, causes={"read": 9.5}
)
STEPS = [
    {
        "step": number,
        "loss": 5.0 / (number + 1),
        "tokens": 100,
        "step_s": 0.1,
        "stall_s": 0.0,
        "grad_norm": 1.0,
        "lr": 1e-3,
    }
    for number in range(4)
]
BUILDS = [{"entry": "/cache/abc", "slices": "3/8", "node": "10.0.0.7"}]


@pytest.fixture
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a page whose run ends behind the first look where a test says so."""
    ends, looked = getattr(request, "param", False), list[int]()

    def look() -> dict[str, Any]:
        charts = [
            chart.to_json() for chart in run_charts(STEPS, [{"step": 3, "eval": "valid", "loss": 1.25}])
        ]
        looked.append(1)
        there = {"<b>sft</b>": charts} if len(looked) < 2 or not ends else {}
        return {
            "servers": [cells_of(LINE)],
            "builds": BUILDS,
            "charts": there,
            "reports": dict.fromkeys(there, "raysvc report 'a <i>'"),
        }

    server, url = page_server(look)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield url
    server.shutdown()
    server.server_close()
    thread.join()


def status(url: str, method: str = "GET") -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_only_who_has_the_token_is_answered_and_only_reads(url: str) -> None:
    host = url.rsplit("/", 2)[0]
    assert host.startswith("http://127.0.0.1:")
    assert (status(url), status(f"{url}look.json")) == (200, 200)
    assert (status(f"{host}/"), status(f"{host}/look.json"), status(f"{host}/wrong/look.json")) == (404,) * 3
    assert (status(url, "POST"), status(url, "DELETE")) == (501, 501)


def test_a_browser_that_leaves_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    asked, left = threading.Event(), threading.Event()

    def look() -> dict[str, Any]:
        asked.set()
        left.wait(60)
        return {"servers": "x" * 20_000_000}

    server, url = page_server(look)
    server.daemon_threads = False  # closing waits for the answer
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    with socket.create_connection(server.server_address[:2]) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.sendall(f"GET /{url.split('/', 3)[3]}look.json HTTP/1.0\r\n\r\n".encode())
        assert asked.wait(60)
    left.set()
    server.shutdown()
    server.server_close()
    thread.join()
    assert capfd.readouterr().err == ""


def seen(url: str, folder: Path) -> str:
    """What a browser shows after some looks."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--enable-logging=stderr"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    flags += ["--window-size=1280,900", "--virtual-time-budget=3000", f"--user-data-dir={folder / 'profile'}"]
    command = [str(BROWSER), *flags, "--dump-dom", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=True).stdout


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("url", [False, True], indirect=True)
def test_the_page_says_that_a_run_has_ended_and_what_reports_it(
    url: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    ended = "The run has ended, or its server has; its report: <code>raysvc report 'a &lt;i&gt;'</code>"
    assert (ended in seen(url, tmp_path)) == request.node.callspec.params["url"]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_a_browser_shows_servers_stalls_and_builds(url: str, tmp_path: Path) -> None:
    shown = seen(url, tmp_path)
    for text in (
        "&lt;b&gt;sft&lt;/b&gt;",
        '<td data-name="waiting">95.0%</td>',  # the name stands beside the value on a phone
        '<td data-name="waited for">read:9.5s</td>',
        '<td data-name="loss">1.5</td>',
        "<h2>Run of &lt;b&gt;sft&lt;/b&gt;</h2>",
        "<figcaption>Loss</figcaption>",
        ">eval valid</div>",
        "<figcaption>Waited for data, ms, and what for</figcaption>",
        '<td data-name="slices">3/8</td>',
        "10.0.0.7",
    ):
        assert text in shown, text
    widths = re.findall(r'<canvas width="(\d+)"', shown)
    assert len(widths) == 5, "one chart each, however often one looks"
    assert len(set(widths)) == 1, "the first one, too, is as wide as its column"
    assert "<b>" not in shown
    assert "as of" in shown


@pytest.mark.ray
def test_builds_in_progress_are_those_of_the_cluster(ray_session: None) -> None:
    import ray

    from raysvc.cli.top import rows
    from raysvc.pipelines.shared_build import NAMESPACE, Builder

    actor = ray.remote(Builder).options(name="a-build", namespace=NAMESPACE, num_cpus=0).remote()
    assert ray.get(actor.facts.remote())["done"] == 0
    (build,) = [each for each in rows(joined, RunLogs())["builds"] if each["entry"] == ""]
    assert (build["slices"], build["node"].count(".")) == ("0/0", 3)
    ray.kill(actor)


def test_a_log_that_grows_is_read_on_and_one_of_a_resumed_run_again(tmp_path: Path) -> None:
    facts, logs = {"journal": f"{tmp_path}/server"}, RunLogs()
    assert logs.of(facts) == logs.of({"journal": "s3://bucket/run/server"}) == logs.of({}) == ([], [])
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step":0,"loss":3}\n{"step":1,"lo')
    assert [line["step"] for line in logs.of(facts).steps] == [0]
    with log.open("a") as file:
        file.write('ss":2}\n{"step":2,"loss":1}\n')
    (tmp_path / "evals.jsonl").write_text('{"step":1,"eval":"held","loss":2}\n')
    assert [line["loss"] for line in logs.of(facts).steps] == [3, 2, 1]
    assert [line["eval"] for line in logs.of(facts).evals] == ["held"]
    resumed = tmp_path / "draft"
    resumed.write_text('{"step":0,"loss":3}\n{"step":1,"loss":9}\n{"step":2,"loss":8}\n{"step":3,"loss":7}\n')
    resumed.rename(log)
    assert [line["loss"] for line in logs.of(facts).steps] == [3, 9, 8, 7]


@pytest.mark.ray
def test_the_page_and_the_terminal_show_the_loss_of_a_run_that_goes_on(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    import raysvc
    from raysvc.cli.top import rows

    job = {"source": {"path": sample["rows"]}, "tokenizer": sample["tokenizer"]}
    found: list[dict[str, Any]] = []

    def look() -> bool:
        found.append(rows(joined, RunLogs()))
        return len(found) > 2

    raysvc.train(
        job,
        should_stop=look,
        cache={"root": str(tmp_path / "cache")},
        plan={"batch_size": 8},
        server={"name": "watched"},
        trainer={"model": "tiny", "run_dir": str(tmp_path / "run")},
    )
    (server,) = [one for one in found[-1]["servers"] if one["server"] == "watched"]
    loss = found[-1]["charts"]["watched"][0]
    assert (loss["title"], loss["x"]) == ("Loss", [0, 1])
    assert found[-1]["reports"]["watched"] == f"raysvc report {tmp_path / 'run'}"
    assert server["loss"] == f"{loss['series'][0]['values'][-1]:.4g}"
