"""What we assume of a process that is stopped and wakes, or is killed."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SLEEPER = """
import fcntl, os, sys, time
held = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)
fcntl.flock(held, fcntl.LOCK_EX)
print(time.monotonic(), time.process_time(), flush=True)
sys.stdin.readline()
print(time.monotonic(), time.process_time(), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock of a file and tells its clocks when it is asked."""
    command = [sys.executable, "-c", SLEEPER, str(tmp_path / "lock")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def clocks(process: subprocess.Popen[str]) -> tuple[float, float]:
    assert process.stdout is not None
    monotonic, cpu = process.stdout.readline().split()
    return float(monotonic), float(cpu)


def is_locked(path: Path) -> bool:
    held = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(held)
    return False


def test_a_stopped_process_keeps_its_lock_and_a_killed_one_does_not(
    sleeper: subprocess.Popen[str], tmp_path: Path
) -> None:
    """So a lock says nothing of who is alive: `only_builder_here` looks for signs of life."""
    clocks(sleeper)
    sleeper.send_signal(signal.SIGSTOP)
    os.waitpid(sleeper.pid, os.WUNTRACED)
    assert is_locked(tmp_path / "lock")
    sleeper.kill()
    sleeper.wait()
    assert not is_locked(tmp_path / "lock")


def test_the_monotonic_clock_goes_on_while_a_process_is_stopped_and_its_cpu_time_does_not(
    sleeper: subprocess.Popen[str],
) -> None:
    """So a lease is measured by the one, and the budget of a render by the other."""
    before = clocks(sleeper)
    sleeper.send_signal(signal.SIGSTOP)
    os.waitpid(sleeper.pid, os.WUNTRACED)
    time.sleep(1.0)
    sleeper.send_signal(signal.SIGCONT)
    assert sleeper.stdin is not None
    sleeper.stdin.write("\n")
    sleeper.stdin.flush()
    after = clocks(sleeper)
    assert after[0] - before[0] >= 1.0
    assert after[1] - before[1] < 0.5


def test_a_stopped_process_has_not_ended(sleeper: subprocess.Popen[str]) -> None:
    """`poll` and signal 0 see a process: neither tells a paused owner from one at work."""
    clocks(sleeper)
    sleeper.send_signal(signal.SIGSTOP)
    os.waitpid(sleeper.pid, os.WUNTRACED)
    assert sleeper.poll() is None
    os.kill(sleeper.pid, 0)
