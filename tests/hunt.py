"""Hunts a flake: one test many times, under CPU stress and with Ray's calls delayed.

    python tests/hunt.py tests/client/test_client.py::test_a_name --times 50

Prints the output of the first failure and how often it failed; exit code 1 when it ever did.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator

# Events of Ray's core before which it waits: calls of actors and their answers, objects, the life of actors. A delay of
# all events would often end Ray while it starts: it gives a driver little time to announce itself.
EVENTS = (
    "CoreWorkerService.grpc_client.PushTask",
    "CoreWorkerService.grpc_server.PushTask",
    "CoreWorkerService.grpc_server.PushTask.HandleRequestImpl",
    "CoreWorkerService.grpc_client.PushTask.OnReplyReceived",
    "CoreWorker.HandlePushTaskActor",
    "CoreWorkerMemoryStore.Put.get_async_callbacks",
    "CoreWorkerService.grpc_client.WaitForActorRefDeleted.OnReplyReceived",
    "CoreWorkerService.grpc_server.UpdateObjectLocationBatch.HandleRequestImpl",
    "ActorInfoGcsService.grpc_server.GetNamedActorInfo.HandleRequestImpl",
    "Subscriber.HandlePublishedMessage_GCS_ACTOR_CHANNEL",
)
MOST_US = 5000


def delays(most_us: int = MOST_US, least_us: int = 0) -> dict[str, str]:
    """The environment in which Ray's core waits so many microseconds before each of `EVENTS`."""
    return {"RAY_testing_asio_delay_us": ",".join(f"{event}={least_us}:{most_us}" for event in EVENTS)}


def _burn() -> None:
    while True:
        sum(range(100_000))


@contextlib.contextmanager
def stress(processes: int) -> Iterator[None]:
    """So many processes that compute all the time."""
    burners = [multiprocessing.Process(target=_burn, daemon=True) for _ in range(processes)]
    for one in burners:
        one.start()
    try:
        yield
    finally:
        for one in burners:
            one.kill()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("test", nargs="+", help="what pytest takes")
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--stress", type=int, default=os.cpu_count() or 1, help="busy processes beside it")
    parser.add_argument("--no-delays", action="store_true", help="without delays in Ray's core")
    parser.add_argument("--late", action="store_true", help="threads of ours are late: tests/late_threads.py")
    options = parser.parse_args()
    env = {**os.environ, **({} if options.no_delays else delays())}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *options.test]
    command += ["-p", "tests.late_threads"] if options.late else []
    failures = 0
    with stress(options.stress):
        for number in range(options.times):
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
            if done.returncode and not failures:
                print(done.stdout[-6000:], done.stderr[-2000:])
            failures += bool(done.returncode)
            print(
                f"run {number + 1} of {options.times}: {'failed' if done.returncode else 'passed'}",
                flush=True,
            )
    print(f"{failures} of {options.times} runs failed")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
