"""`raysvc top --web`: who is answered, what a browser shows, and builds of a real cluster."""

from __future__ import annotations

import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raysvc.inspect.live import Line, cells_of
from raysvc.inspect.web import page_server

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LINE = Line("<b>sft</b>", "held", "host:1", "0.1.0", 3, 15, stall=0.95, stall_s=9.5, causes={"read": 9.5})
BUILDS = [{"entry": "/cache/abc", "slices": "3/8", "node": "10.0.0.7"}]


@pytest.fixture
def url() -> Iterator[str]:
    def look() -> dict[str, Any]:
        return {"servers": [cells_of(LINE)], "builds": BUILDS}

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


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_a_browser_shows_servers_stalls_and_builds(url: str, tmp_path: Path) -> None:
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--enable-logging=stderr"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    flags += ["--virtual-time-budget=3000", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", url]
    done = subprocess.run([str(BROWSER), *flags], capture_output=True, text=True, timeout=90, check=True)
    for text in (
        "&lt;b&gt;sft&lt;/b&gt;",
        '<td data-name="stall">95.0%</td>',  # the name stands beside the value on a phone
        '<td data-name="why">read:9.5s</td>',
        '<td data-name="slices">3/8</td>',
        "10.0.0.7",
    ):
        assert text in done.stdout, text
    assert "<b>" not in done.stdout
    assert "as of" in done.stdout


@pytest.mark.ray
def test_builds_in_progress_are_those_of_the_cluster(ray_session: None) -> None:
    import ray

    from raysvc.cli.top import rows
    from raysvc.pipelines.shared_build import NAMESPACE, Builder

    actor = ray.remote(Builder).options(name="a-build", namespace=NAMESPACE, num_cpus=0).remote()
    assert ray.get(actor.facts.remote())["done"] == 0
    (build,) = [each for each in rows()["builds"] if each["entry"] == ""]
    assert (build["slices"], build["node"].count(".")) == ("0/0", 3)
    ray.kill(actor)
