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

DELAYS = "*=0:1000"  # microseconds that Ray's core waits before it handles an event


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
    options = parser.parse_args()
    env = {**os.environ, **({} if options.no_delays else {"RAY_testing_asio_delay_us": DELAYS})}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *options.test]
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
