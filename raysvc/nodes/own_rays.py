"""Finds the local Rays that this user's processes have started on this machine, and the one that a command without an address means.

    <tmp>/raysvc-<uid>/rays/<pid>     address of the Ray that the process started, and who is let in; removed when it ends it

Always true:
- the newest Ray of this user whose process lives and that lets this process in is taken; another user's, or one that is gone, never;
- else the one that Ray itself would find is taken, if it answers in time: none of Ray's own lines is printed, and nothing is waited
  for longer.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

MODE = "RAY_AUTH_MODE"
ANSWER_S = 5.0
IMPORT_S = 60.0  # of ray, on a busy machine
JOIN = """
import os, ray
print("ready", flush=True)
ray.init("auto", logging_level="ERROR", log_to_driver=False)
print(ray.get_runtime_context().gcs_address, os.environ.get("RAY_AUTH_MODE", "disabled"), flush=True)
"""


class LocalRay(NamedTuple):
    """A Ray of this machine.

    Attributes:
        address: host:port.
        mode: RAY_AUTH_MODE of it.
        token: digest of the token that it asks for; "" where it asks for none.
    """

    address: str
    mode: str
    token: str


def note(address: str) -> None:
    """Remember the Ray that this process started; a folder that cannot be written costs nothing else."""
    with suppress(OSError):
        folder = _folder()
        for one in (folder.parent, folder):
            one.mkdir(mode=0o700, exist_ok=True)
        if _is_own(folder):
            mode = os.environ.get(MODE, "disabled")  # Ray sets it where it starts
            (folder / str(os.getpid())).write_text(json.dumps([address, mode, _token(mode)]))


def forget() -> None:
    """The Ray of this process has ended."""
    with suppress(OSError):
        (_folder() / str(os.getpid())).unlink(missing_ok=True)


def living() -> list[LocalRay]:
    """The Rays that living processes of this user have started and that let this one in, the newest first."""
    folder = _folder()
    if not _is_own(folder):
        return []
    found = []
    for path in folder.iterdir():
        with suppress(OSError, ValueError, TypeError):
            if _lives(int(path.name)):
                found.append((path.stat().st_mtime, LocalRay(*json.loads(path.read_text()))))
            else:
                path.unlink()
    return [ray for _, ray in sorted(found, reverse=True) if _lets_in(ray)]


def enter(ray: LocalRay) -> str:
    """Returns the address to connect to; a Ray that asks for a token gets it, which one that is named by its address does not.

    Before ray is imported: it reads the mode then.
    """
    os.environ.setdefault(MODE, ray.mode)
    return ray.address


def found_by_ray(answer_s: float = ANSWER_S) -> LocalRay | None:
    """The Ray that `auto` means and that answers in time; None where there is none, or it does not let this user in.

    Another process asks: one that waits for a Ray cannot be interrupted, and prints a line a second.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", JOIN], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
    )
    assert process.stdout is not None
    try:
        if line_of(process, IMPORT_S) != "ready":
            return None
        address, _, mode = line_of(process, answer_s).partition(" ")
        return LocalRay(address, mode, _token(mode)) if address else None
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def may_need_a_token() -> bool:
    """Returns whether this user has a token and Ray does not send it, though Rays that the user starts ask for it."""
    return MODE not in os.environ and bool(_sent())


def _lets_in(ray: LocalRay) -> bool:
    return os.environ.get(MODE, ray.mode).lower() == ray.mode and _token(ray.mode) == ray.token


def _token(mode: str) -> str:
    """Digest of the token that Ray would send from this process."""
    return hashlib.sha256(_sent().encode()).hexdigest()[:16] if mode == "token" else ""


def _sent() -> str:
    """The token itself; "" where this user has none."""
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    token = os.environ.get("RAY_AUTH_TOKEN")
    if token is None:
        token = path.read_text() if path.is_file() else ""
    return token.strip()


def line_of(process: subprocess.Popen[bytes], within_s: float) -> str:
    """Returns the next line of a process; "" where it ended or said none in time."""
    import select

    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], within_s)
    return process.stdout.readline().decode().strip() if ready else ""


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"raysvc-{os.getuid()}" / "rays"


def _is_own(folder: Path) -> bool:
    """Tells whether nobody else can write there: the temporary folder is everybody's."""
    try:
        facts = folder.parent.lstat(), folder.lstat()
    except OSError:
        return False
    return all(one.st_uid == os.getuid() and not one.st_mode & 0o022 for one in facts)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:  # also another user's: the number was given again
        return False
    return True
