"""Joining a Ray cluster, or starting a small one in this process tree.

Always true:
- a process that is connected already stays as it is;
- without an address (argument or RAY_ADDRESS) a local Ray is started that ends with this process, except for who looks for something
  that is there already (`join_cluster`).
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

from raysvc.errors import AddressError
from raysvc.nodes import own_rays

log = logging.getLogger(__name__)
PROBE_TIMEOUT_S = 5.0
RETRIES = r"Task MapWorker.* retries remaining"  # of Ray Data's workers; what else is repeated in the process is shown
KNOCK_EVERY_S, KNOCKS = 1.0, 2  # a cluster that does not answer so many times has ended
START_ENDS_S = 15.0  # of a local Ray, where a process wants to end meanwhile
_connecting = threading.Lock()  # one thread of a process connects it, the others find it connected
_started: list[str] = []  # addresses of the local Rays that this process has started


def connect(address: str | None = None, *, need_cpus: float = 0) -> str:
    """Connect this process to Ray; returns "local" or the address.

    Args:
        address: of a running cluster; default RAY_ADDRESS, else a local Ray is started.
        need_cpus: what the actors of a job hold at the same time; a local Ray gets at least this many.

    Raises:
        AddressError: nothing answers at the address, or a local Ray does not start.
    """
    with _connecting:
        return _connect(address or os.environ.get("RAY_ADDRESS"), need_cpus)


def join_cluster(address: str | None, *, lasting: bool = False) -> None:
    """Connect to a cluster that is there: the address, RAY_ADDRESS, the newest of this user's own runs, or one on this machine.
    Starts none.

    Args:
        lasting: one that does not end with a run.

    Raises:
        AddressError: there is none that answers.
    """
    named = address or os.environ.get("RAY_ADDRESS")
    if is_joined():
        return
    if named or lasting:
        connect(named or "auto")
        return
    own = own_rays.living()
    if len(own) > 1:
        others = " or ".join(one.address for one in own[1:])
        log.warning(
            "this is the newest of %d runs of yours; --address %s is of another one", len(own), others
        )
    found = own[0] if own else own_rays.found_by_ray()
    if found is None:
        what = "no run of yours has one on this machine, and no other one answers within 5 seconds"
        remedy = "start one with `ray start --head`, or name yours: RAY_ADDRESS, --address host:port, or address= of a call"
        raise AddressError("Ray", what, remedy)
    connect(own_rays.enter(found))


def is_joined() -> bool:
    """Returns whether this process is connected to Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def starts_own(address: str | None = None) -> bool:
    """Returns whether `connect` would start a Ray of this process."""
    _import_ray(address or os.environ.get("RAY_ADDRESS"))
    import ray

    return (address or os.environ.get("RAY_ADDRESS") or "local") == "local" and not ray.is_initialized()


def _connect(address: str | None, need_cpus: float) -> str:
    _import_ray(address)
    import ray

    if ray.is_initialized():
        return address or "local"
    if address and address != "local":
        _join(address)
        return address
    cores = max(os.cpu_count() or 1, math.ceil(need_cpus))
    start = partial(ray.init, address="local", num_cpus=cores, include_dashboard=False,
                    logging_level=logging.ERROR, log_to_driver=False)  # fmt: skip
    try:
        for _ in range(2):
            try:
                start()
                break
            except Exception as error:  # noqa: BLE001 - Ray raises a bare one where its processes are late
                log.warning("Ray did not start error=%s; trying again", _first_line(error))
                ray.shutdown()
        else:
            start()
    except Exception as error:
        what = f"did not start on this machine: {_first_line(error)}"
        remedy = "run the same command again when the machine is less busy, or join a cluster with --address"
        raise AddressError("Ray", what, remedy) from error
    _started.append(ray.get_runtime_context().gcs_address)
    own_rays.note(_started[-1])
    atexit.register(leave)  # before the one of Ray, which is registered already
    return "local"


def _import_ray(address: str | None) -> None:
    # Ray says once that a node is lost, and would say of every call of a build's workers there that it is repeated
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", RETRIES)
    if not address or address == "local":
        # under `uv run` Ray would copy the folder, and have uv make an environment for each worker
        os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        # a thread that still asks for an actor at the end would start another Ray
        os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    import ray  # noqa: F401


def leave() -> None:
    """End the local Ray that `connect` started in this process; any other stays.

    Ray does the same at the exit of the interpreter, half a second later.

    A start in another thread is waited for: an exit in its middle is an abort, and processes of it stay behind.
    """
    import ray

    if not _connecting.acquire(blocking=False):
        log.warning("Ray is starting, and is ended when it has started; Ctrl-C again leaves at once")
        if not _connecting.acquire(timeout=START_ENDS_S):
            return
    try:
        if not _started or not ray.is_initialized():
            return
        if ray.get_runtime_context().gcs_address not in _started:
            return
        own_rays.forget()
        _started.clear()
        ray.shutdown()
    finally:
        _connecting.release()


def was_ended() -> bool:
    """Returns whether the local Ray of this process was ended by somebody else: nothing listens where its head did."""
    for address in list(_started):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), PROBE_TIMEOUT_S).close()
        except ConnectionRefusedError:
            return address in _started
        except OSError:  # it is late
            continue
    return False


def starting(address: str | None = None, *, need_cpus: float = 0) -> Future[str]:
    """`connect` in a thread of its own, beside what does not need Ray.

    Ray's package is imported first, here: its modules import each other in circles, and a second thread that imports one
    of them meanwhile finds it half made.

    The thread stays: Linux ends the processes of a local Ray with the thread that started them.
    """
    _import_ray(address or os.environ.get("RAY_ADDRESS"))
    done: Future[str] = Future()

    def run() -> None:
        try:
            done.set_result(connect(address, need_cpus=need_cpus))
        except BaseException as error:  # noqa: BLE001  told to whoever asks for the result
            done.set_exception(error)
            return
        threading.Event().wait()

    threading.Thread(target=run, name="raysvc-ray-start", daemon=True).start()
    return done


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _join(address: str) -> None:
    import ray

    _refuse_where_nobody_listens(address)
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        if address == "auto" and isinstance(error, ConnectionError):
            remedy = (
                "start one with `ray start --head`, or name yours with --address host:port or RAY_ADDRESS"
            )
            raise AddressError("Ray", "no cluster runs on this machine", remedy) from error
        first_line = _first_line(error)
        remedy = "check the address, and RAY_AUTH_MODE and the token when the cluster asks for one"
        if own_rays.may_need_a_token():
            remedy = "check the address, and set RAY_AUTH_MODE=token, as `ray start` does where the user has a token"
        raise AddressError(f"--address {address}", first_line, remedy) from error


def _refuse_where_nobody_listens(address: str) -> None:
    """Ray itself tries for minutes, and says so in log lines of its own."""
    if not address.rpartition(":")[2].isdigit():
        return  # "auto" and other names that Ray looks up
    try:
        _knock(address)
    except (OSError, OverflowError) as error:
        what = f"nothing listens there ({getattr(error, 'strerror', None) or error})"
        remedy = (
            "give host:port as `ray start --head` prints it, or ray://host:10001 from outside the cluster"
        )
        raise AddressError(f"--address {address}", what, remedy) from None


def _knock(address: str) -> None:
    host, _, port = address.rpartition("://")[2].rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), PROBE_TIMEOUT_S).close()


@contextmanager
def ending_with(address: str, code: int = 0) -> Iterator[None]:
    """Within it this process ends soon after the cluster at an address: a call to one that is gone waits a minute, and cannot be interrupted.

    Args:
        code: exit code of the process then.
    """
    left = threading.Event()

    def watch() -> None:
        failed = 0
        while failed < KNOCKS:
            if left.wait(KNOCK_EVERY_S):
                return
            try:
                _knock(address)
                failed = 0
            except OSError:
                failed += 1
        show_cursor = "\x1b[?25h" if sys.stdout.isatty() else ""  # which a live table hides
        os.write(2, f"{show_cursor}the cluster at {address} has ended\n".encode())
        os._exit(code)

    threading.Thread(target=watch, name="raysvc-cluster-watch", daemon=True).start()
    try:
        yield
    finally:
        left.set()


def node_for(placement: str, data: str, trainer_node: Callable[[], str] | None = None) -> str | None:
    """Id of the node where a server starts; None: any.

    Args:
        placement: `any`, `data` or `trainer`.
        data: path or URL; what lies in an object store is as near to one node as to another.
        trainer_node: of the trainer's rank 0; None: the trainer is this process.
    """
    import ray

    from raysvc.cache.store.open import open_store

    if placement == "any" or (placement == "data" and open_store(data).local_path("") is None):
        return None
    if placement == "trainer" and trainer_node is not None:
        return trainer_node()
    own: str = ray.get_runtime_context().get_node_id()
    return own
