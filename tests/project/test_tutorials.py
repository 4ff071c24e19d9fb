"""The tutorials, as a reader types them: every file is saved, every command is run, and prints the lines that the page shows.

A block whose first line is a comment with a file name is saved under that name. Of a `console` block, lines that begin
with `$` are commands; the lines below one are some of those that it prints, in their order. Numbers may differ, and `…`
stands for any text.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"# (\S+\.\w+)\n")
NUMBER = re.compile(r"\b[0-9a-f]{16,}\b|\d(?:[\d,.:]*\d)?")
PORTS = ("6391", "5051")  # of the cluster and the S3 server of the fourth tutorial
MARK = "--- exit code of command "


class Command(NamedTuple):
    """What is typed, and lines that come of it."""

    text: str
    lines: list[str]


def blocks_of(page: str) -> Iterator[tuple[str, str] | Command]:
    """Files to save, as (name, text), and commands, in the order of the page."""
    for language, text in BLOCK.findall(page):
        named = FILE.match(text)
        if language == "console":
            for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                command, _, lines = part.partition("\n")
                yield Command(command, lines.splitlines())
        elif named:
            yield named[1], text


def script_of(page: str, folder: Path) -> tuple[str, list[Command]]:
    """Bash for a whole page, one shell for all its commands, and the commands."""
    script, commands = [], []
    for number, block in enumerate(blocks_of(page)):
        if isinstance(block, Command):
            script += [block.text, f'echo "{MARK}{len(commands)}: $?"']
            commands.append(block)
        else:
            held = folder / f".saved-{number}"
            held.write_text(block[1])
            script.append(f"cp {held.name} {block[0]}")
    return "\n".join(script), commands


def missing(wanted: list[str], printed: list[str]) -> str | None:
    """The first wanted line that does not come after the ones before it, or None."""
    lines = iter([NUMBER.sub("#", line.strip()) for line in printed])
    for line in wanted:
        pattern = re.escape(NUMBER.sub("#", line.strip())).replace("…", ".*")
        if line.strip() and not any(re.fullmatch(pattern, each) for each in lines):
            return line
    return None


def with_free_ports(text: str) -> str:
    """The page with ports that nobody listens on: other tests, and other clones, run the same page."""
    with contextlib.ExitStack() as held:
        for port in PORTS:
            free = held.enter_context(socket.create_server(("127.0.0.1", 0)))
            text = text.replace(port, str(free.getsockname()[1]))
    return text


def run(page: Path, folder: Path) -> None:
    """Type the page in `folder`.

    Raises:
        AssertionError: a command failed, or did not print a line that the page shows.
    """
    script, commands = script_of(with_free_ports(page.read_text()), folder)
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as temp:  # sockets want short paths
        env = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "AWS_"))}
        env |= {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}", "COLUMNS": "100"}
        env |= {"RAY_TMPDIR": temp, "HOME": temp}  # neither another cluster nor another token
        env |= {"RAY_memory_monitor_refresh_ms": "0"}  # as in conftest: others' memory kills no worker here
        done = subprocess.run(
            ["bash", "-c", script], cwd=folder, env=env, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=400,
        )  # fmt: skip
    parts = re.split(rf"^{MARK}\d+: (\d+)\n", done.stdout, flags=re.MULTILINE)
    assert len(parts) == 2 * len(commands) + 1, done.stdout[-3000:]
    for number, command in enumerate(commands):
        printed, code = parts[2 * number], parts[2 * number + 1]
        assert code == "0", f"{page.name}: {command.text}: {printed[-3000:]}"
        lost = missing(command.lines, printed.splitlines())
        assert lost is None, (
            f"{page.name}: {command.text} does not print {lost!r} there, but:\n{printed[-6000:]}"
        )


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a reader has done the first tutorial."""
    folder = tmp_path_factory.mktemp("tutorial")
    (folder / "examples").symlink_to(ROOT / "examples")
    run(PAGES[0], folder)
    return folder


def test_there_are_seven_in_their_order() -> None:
    assert [page.name.partition("-")[0] for page in PAGES] == list("1234567")
    assert all(any(isinstance(block, Command) for block in blocks_of(page.read_text())) for page in PAGES)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_runs_and_prints_what_the_page_shows(page: Path, first: Path, tmp_path: Path) -> None:
    if page != PAGES[0]:
        folder = tmp_path / "as"
        shutil.copytree(first, folder, symlinks=True)
        run(page, folder)


def test_a_line_that_is_not_printed_is_found() -> None:
    printed = ["rows: 400", "steps: 25", "done in 3 s"]
    assert missing(["rows: 512", "done in … s"], printed) is None
    assert missing(["steps: 1", "rows: 1"], printed) == "rows: 1", "not in this order"
    assert missing(["columns: 3"], printed) == "columns: 3"
