"""How the commands behave at a terminal and without one: help, completion, colours, loudness, Ctrl-C, notebooks."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from raysvc.cli.main import app
from raysvc.cli.view import View, show_progress
from raysvc.progress import Tick

RAYSVC = [sys.executable, "-m", "raysvc.cli"]
runner = CliRunner()


def commands(group: Any = None, names: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for name, command in (group or get_command(app)).commands.items():
        below = commands(command, (*names, name)) if hasattr(command, "commands") else [(*names, name)]
        found += below
    return found


@pytest.mark.parametrize("names", commands(), ids=" ".join)
def test_the_help_of_every_command_has_an_example_and_the_common_options(names: tuple[str, ...]) -> None:
    result = runner.invoke(app, [*names, "--help"])
    assert result.exit_code == 0, result.stderr
    words = " ".join(result.stdout.split())
    assert f"Example: raysvc {' '.join(names)}" in words
    assert all(option in words for option in ("--verbose", "--quiet", "--json"))


def test_the_shell_completes_commands_and_options() -> None:
    def completed(words: str, at: int) -> str:
        env = {**os.environ, "_RAYSVC_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(at)}
        code = "from raysvc.cli.main import app; app(prog_name='raysvc')"
        return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False).stdout  # fmt: skip

    assert completed("raysvc tok", 1).split() == ["tokenize"]
    assert "--headroom" in completed("raysvc train --head", 2).split()


def at_a_terminal(code: str, **env: str) -> str:
    """What a program writes when its standard output is a terminal."""
    ours, theirs = pty.openpty()
    done = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", **env},
    )
    os.close(theirs)
    out = b""
    try:
        while chunk := os.read(ours, 65536):
            out += chunk
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(ours)
    assert done.wait() == 0, out
    return out.decode()


SHOW = """
from raysvc.cli.show import _print, _Shown
from raysvc.cli.view import View, print_table
from raysvc.inspect.row_view import row_picture, RowPicture, TextRun
from raysvc.progress import Tick
row = RowPicture(0, 3, 1, (TextRun("question", "context"), TextRun("answer", "trained")))
_print(_Shown("t", [], [("head", row)]))
with View() as view:
    view(Tick("work", 1, 2, "rows", final=True))
"""


def test_colours_are_for_terminals_that_want_them_and_marks_are_there_always() -> None:
    coloured, plain = at_a_terminal(SHOW), at_a_terminal(SHOW, NO_COLOR="1")
    piped = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, check=True)
    assert "\x1b[1;32m»answer«" in coloured
    assert all(f"\x1b[{code}" not in plain for code in ("1;32m", "32m", "36m", "38;"))
    assert "\x1b" not in piped.stdout + piped.stderr
    assert all("»answer«" in text for text in (coloured, plain, piped.stdout))
    assert "━" in coloured
    assert piped.stderr == "[work] 1/2 rows done\n"


WAIT = """
from raysvc.cli.view import View
from raysvc.progress import Tick
with View() as view:
    for tick in TICKS:
        view(tick)
        view._live.refresh()
"""


@pytest.mark.parametrize(
    ("ticks", "last"),
    [
        ('[Tick("start", 0, None, "", waiting="starting Ray")]', "start (starting Ray)"),
        ('[Tick("start", 0, None, "", waiting="starting Ray"), Tick("start", 0, None, "")]', "start"),
        ('[Tick("start", 0, None, "", waiting="Ray"), Tick("start", 0, None, ""), Tick("start", 0, None, "", waiting="a worker")]', "start (a worker)"),
        ('[Tick("tokenize", 7, None, "rows")]', "tokenize 7 rows"),
        ('[Tick("train", 3, 14, "steps", waiting="rows")]', "train 3/14 steps (rows)"),
    ],
)  # fmt: skip
def test_a_phase_counts_what_it_knows_and_spins_only_while_it_waits(ticks: str, last: str) -> None:
    seen = at_a_terminal(WAIT.replace("TICKS", ticks), COLUMNS="120", NO_COLOR="1")
    lines = [
        line
        for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen).replace("\r", "\n").split("\n")
        if line.strip()
    ]
    shown = re.sub(r"[━╸╺ ]+|\d:\d\d:\d\d", " ", lines[-1])
    assert " ".join(re.sub(r"[⠀-⣿]", "", shown).split()) == last
    spins = bool(re.search(r"[⠁-⣿]", lines[-1]))
    assert spins == (last != "start")


def test_quiet_shows_no_progress_wherever_it_stands(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import logging

    level = logging.getLogger().level
    try:
        for arguments, wanted in (
            (["-q", "cache", "ls"], (False, logging.ERROR)),
            (["cache", "ls", "-q"], (False, logging.ERROR)),
            (["-v", "cache", "ls"], (True, logging.INFO)),
            (["cache", "ls"], (True, logging.WARNING)),
        ):
            assert runner.invoke(app, [*arguments, "--root", str(tmp_path)]).exit_code == 0
            with View() as view:
                view(Tick("work", 1, 2, "rows"))
            assert (bool(capsys.readouterr().err), logging.getLogger().level) == wanted, arguments
    finally:
        show_progress(True)
        logging.getLogger().setLevel(level)


def test_without_a_terminal_the_first_and_the_last_tick_of_a_phase_are_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with View() as view:
        for done in range(1, 100):
            view(Tick("work", done, 200, "rows"))
        view(Tick("rest", 1, None, "steps", final=True))
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["[work] 1/200 rows", "[rest] 1 step done", "[work] 99/200 rows"]


def test_tables_are_plain_and_whole_where_nobody_looks() -> None:
    code = """
from raysvc.cli.view import print_rows, print_table
print_rows("t", [{"name": "x" * 300, "n": 1}]); print_table("Run", {"rows": 1234, "rate": 17963.4})
"""
    piped = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert piped == f"name\tn\n{'x' * 300}\t1\nRun\nrows: 1,234\nrate: 17,963\n"
    assert "┃" in at_a_terminal(code)


# A signal that comes between the interpreter's last look and the system call in which it then waits does not end the wait.
# So the child is woken every 50 ms, and looks again.
WOKEN = """
import atexit, signal
signal.signal(signal.SIGALRM, lambda number, frame: None)
signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)
"""

HANGS = f"""{WOKEN}
import time
from raysvc.cli.common import edge
@edge
def slow():
    try:
        print("begun", flush=True)
        time.sleep(60)
    finally:
        print("cleaning", flush=True)
        time.sleep(60)
slow()
"""


def test_a_second_ctrl_c_leaves_at_once() -> None:
    process = subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "cleaning\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=50) == 130, "it does not sleep for its minute"
    assert "exited immediately" in process.communicate()[1]


STARTS = f"""{WOKEN}
import logging, sys, threading
import typer
from raysvc import cluster
from raysvc.cli.common import edge
waited_for = threading.Event()
class Told(logging.Handler):
    def emit(self, record):
        waited_for.set()
cluster.log.addHandler(Told())
def start(address, need_cpus):
    print("starting", flush=True)
    (waited_for if sys.argv[1] == "ends" else threading.Event()).wait(60)
    print("started", flush=True)
cluster._connect = start
@edge
def command():
    cluster.starting().result()
try:
    command()
except typer.Exit as end:
    sys.exit(end.exit_code)
"""


@pytest.mark.parametrize(
    ("start", "out", "told"),
    [("ends", "started\n", "again leaves at once"), ("hangs", "", "exited immediately")],
)
def test_ctrl_c_while_ray_starts_waits_for_it_and_a_second_one_does_not(
    start: str, out: str, told: str
) -> None:
    """Nobody may leave in the middle of it: Ray's threads abort the process."""
    command = [sys.executable, "-c", STARTS, start]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "starting\n"
    process.send_signal(signal.SIGINT)
    if start == "hangs":
        assert process.stderr.readline().startswith("interrupted: ")
        process.send_signal(signal.SIGINT)
    rest, said = process.communicate(timeout=50)
    assert (process.returncode, rest) == (130, out), said
    assert told in said


IMPORTS = f"""{WOKEN}
import sys
sys.path.insert(0, sys.argv[1])
from raysvc.cli.common import edge
@edge
def slow():
    try:
        import waits
    except BaseException:
        print("swallowed", flush=True)
slow()
"""


def test_ctrl_c_in_an_import_ends_the_command_quietly(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    starts = f"{WOKEN}from raysvc.cli import __main__ as m; import sys, signal; signal.signal(signal.SIGINT, m.leave); import waits"
    for code in (IMPORTS, f"import sys; sys.path.insert(0, sys.argv[1]); {starts}"):
        process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=55)
        assert (process.returncode, out, err.strip()) == (130, "", "interrupted")


ENDED = f"""{WOKEN}
import os, signal, socket, time
from raysvc import cluster
from raysvc.cli import interrupt
head = socket.create_server(("127.0.0.1", 0))
cluster._started.append("127.0.0.1:%d" % head.getsockname()[1])
with interrupt.twice():
    assert not interrupt.asked_to_stop()
    os.kill(os.getpid(), signal.SIGTERM)
    assert interrupt.asked_to_stop() and not cluster.was_ended()
    print("asked", flush=True)
    head.close()
    while True:
        time.sleep(0.05)
"""


def test_a_run_whose_local_ray_got_the_same_sigterm_ends_in_a_line() -> None:
    done = subprocess.run([sys.executable, "-c", ENDED], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (143, "asked\n"), done.stderr
    said = "interrupted: Ray was ended too; the same command goes on from the last checkpoint"
    assert done.stderr.splitlines()[-1] == said


def test_the_version_is_said() -> None:
    import raysvc

    assert runner.invoke(app, ["--version"]).stdout == f"raysvc {raysvc.__version__}\n"


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_the_first_ctrl_c_ends_a_run_after_its_step_and_the_same_command_goes_on(
    sent: signal.Signals, tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    import raysvc
    from raysvc.training.run_folder import RunFolder

    sections = {
        "source": {"path": sample["rows"], "format": "chat"},
        "tokenizer": sample["tokenizer"],
        "cache": {"root": str(tmp_path / "cache")},
        "plan": {"batch_size": 8, "epochs": 50, "micro_batch_tokens": 1024},
        "server": {"name": "pressed"},
        "trainer": {"run_dir": str(tmp_path / "run"), "checkpoint_every_steps": None},
    }
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(sections))
    raysvc.tokenize(job)
    process = subprocess.Popen([*RAYSVC, "train", "-c", str(job)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)  # fmt: skip
    folder = RunFolder(tmp_path / "run")
    while not folder.rows.exists() or folder.rows.read_bytes().count(b"\n") < 3:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    if sent == signal.SIGINT:
        os.killpg(process.pid, sent)  # as a terminal does: workers and servers of a local Ray get it too
    else:
        process.terminate()  # as clusters do, to the one command of a container
    said = process.communicate(timeout=280)[1]
    assert process.returncode == 128 + sent, said
    assert "stopping after this step" in said
    assert "***" not in said, "Ray's own handler"
    checkpoint = folder.newest()
    assert checkpoint is not None
    assert checkpoint.step >= 3
    assert f"interrupted: {checkpoint.step} steps are trained and saved" in said
    assert [line["step"] for line in folder.lines(folder.rows)] == list(range(checkpoint.step))
    assert checkpoint.state["data"]["frontier"] == checkpoint.step
    assert (folder.summary() or {})["steps"] == checkpoint.step

    summary = raysvc.train(job, trainer={"max_steps": checkpoint.step + 1, "resume": "changed"}).metrics
    assert (summary["resumed_from"], summary["steps"]) == (checkpoint.step, checkpoint.step + 1)


def test_what_a_notebook_shows_is_small_and_only_text(tmp_path: Path) -> None:
    import numpy as np

    from raysvc.actors.server.make_step import Recipe, make_step
    from raysvc.builds.cache_entry import CacheEntry
    from raysvc.client.steps import MiniBatch, Step
    from raysvc.job.config import PlanConfig
    from raysvc.plan.plan import Plan
    from raysvc.row_batch import RowBatch

    class Hostile:
        key, num_rows, num_tokens = "ab" * 32, 4000, 123456
        uri = "/x/<script>alert(1)</script>"
        report = {"paths": ["<img src=x>" * 100]}  # noqa: RUF012 - of one test

    plan = Plan(PlanConfig(batch_size=4), np.full(12, 5, np.int32))

    def read(mini: Any) -> RowBatch:
        tokens = {"input_ids": np.ones(20, np.int32), "loss_mask": np.ones(20, np.uint8)}
        return RowBatch(mini.row_ids, np.arange(0, 21, 5), tokens, {})

    info, shards = make_step([plan.step(1, 2)], read, [Recipe(plan.config, 0)])
    step = Step(1, 0, (MiniBatch(shards, info.mini_batches[0]),))
    shown = {
        CacheEntry((Hostile(),)): ("4,000", "123,456"),  # type: ignore[arg-type]
        plan: ("12", "full, seed 0"),
        shards[1]: ("padded_right [2, 5]", "input_ids attention_mask"),
        step: ("trained tokens", "16"),
    }
    for thing, words in shown.items():
        html: str = thing._repr_html_()  # type: ignore[attr-defined]
        assert all(word in html and word in repr(thing) for word in words), html
        assert "<script" not in html
        assert "<img" not in html
        assert html.startswith("<table>")
        assert len(html) < 2500
        assert len(repr(thing)) < 500
        assert "<details" not in html
    fetched_ahead = Step(1, 0, (MiniBatch(shards, None),))
    assert "trained tokens" not in repr(fetched_ahead)
