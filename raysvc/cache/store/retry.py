"""Tells the failures of a remote store that pass by themselves, and waits for that.

Always true:
- pauses double from `FIRST_PAUSE_S`, with jitter; after `ATTEMPTS` attempts or `DEADLINE_S` no other one begins;
- a store that never answered this process is given `FIRST_ANSWER_S`, not `DEADLINE_S`;
- refused credentials and missing buckets are never tried again: they are StoreErrors that say what to do.
"""

from __future__ import annotations

import errno
import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from raysvc.errors import StoreError

T = TypeVar("T")
ATTEMPTS = 6
DEADLINE_S = 120.0
FIRST_PAUSE_S = 0.2
FIRST_ANSWER_S = 10.0
PASSING = {
    errno.EBUSY,
    errno.EREMOTEIO,
    errno.EAGAIN,
    errno.ETIMEDOUT,
    errno.ECONNRESET,
    errno.ECONNREFUSED,
    errno.ECONNABORTED,
    errno.EPIPE,
    errno.ESTALE,
}
# of botocore; neither is a ConnectionError of Python
UNREACHED = {"EndpointConnectionError", "ConnectTimeoutError"}
logger = logging.getLogger(__name__)


def retried(url: str, what: str, action: Callable[[], T], sleep: Callable[[float], None] = time.sleep) -> T:
    """The action's result, after as many attempts as it takes.

    Args:
        url: of the store, for messages.
        what: the operation in one word.
        action: one attempt; safe to repeat.
        sleep: how to pause, in seconds.

    Raises:
        StoreError: credentials, bucket, or a store that did not answer.
        OSError: what a retry cannot fix, such as FileNotFoundError.
    """
    deadline_s = time.monotonic() + DEADLINE_S
    for attempt in range(ATTEMPTS):
        try:
            return action()
        except Exception as error:
            refusal = _refusal(url, error)
            if refusal is not None:
                raise refusal from error
            if not passes_by_itself(error):
                raise
            if attempt == ATTEMPTS - 1 or time.monotonic() > deadline_s:
                raise StoreError(
                    url,
                    f"{what} failed {attempt + 1} times ({_said(error)})",
                    "check the network and the store, then run again",
                ) from error
            pause_s = FIRST_PAUSE_S * 2**attempt * random.uniform(0.5, 1.0)
            logger.warning(
                "store retry url=%s what=%s attempt=%d pause_s=%.2f error=%s",
                url,
                what,
                attempt,
                pause_s,
                _said(error),
            )
            sleep(pause_s)
    raise AssertionError("unreachable")


def first_answer(url: str, ask: Callable[[], object], limit_s: float = FIRST_ANSWER_S) -> None:
    """Return when the store answered for the first time, whatever it said.

    Args:
        url: of the store, for messages.
        ask: a cheap request; it is left to itself when it hangs.
        limit_s: how long a store may take that never answered before.

    Raises:
        StoreError: no answer in time.
    """
    answered = threading.Event()
    failure: list[BaseException] = []

    def attempt() -> None:
        try:
            ask()
        except Exception as error:  # noqa: BLE001  judged below
            failure.append(error)
        answered.set()

    threading.Thread(target=attempt, name="raysvc-first-answer", daemon=True).start()
    if not answered.wait(limit_s):
        raise StoreError(url, f"it did not answer in {limit_s:.0f} s", "check the address and the network")
    if failure and isinstance(failure[0], StoreError):
        raise failure[0]
    if failure and _names(failure[0]) & UNREACHED:
        raise StoreError(url, f"it did not answer ({_said(failure[0])})", "check the address and the network")


def passes_by_itself(error: BaseException) -> bool:
    """True for time-outs, throttling, 5xx, 409 and broken connections."""
    if isinstance(error, TimeoutError | ConnectionError):
        return True
    status = _status(error)
    if status is not None:
        return status in (408, 409, 429) or (status >= 500 and status != 501)
    if isinstance(error, OSError) and error.errno in PASSING:
        return True
    return bool(
        _names(error)
        & {
            "FSTimeoutError",
            "ClientConnectionError",
            "ClientPayloadError",
            "HTTPClientError",
            "IncompleteRead",
            *UNREACHED,
        }
    )


def _names(error: BaseException) -> set[str]:
    return {cls.__name__ for cls in type(error).__mro__}


def _refusal(url: str, error: BaseException) -> StoreError | None:
    names = _names(error)
    forbidden = isinstance(error, PermissionError) or str(error).startswith("Forbidden")  # s3fs, gcsfs
    if forbidden or names & {"NoCredentialsError", "PartialCredentialsError"}:
        return StoreError(
            url,
            f"access is refused ({_said(error)})",
            "check the credentials (AWS_ACCESS_KEY_ID, ..., or cache.storage_options)",
        )
    if isinstance(error, FileNotFoundError) and _says_no_bucket(error):
        return StoreError(
            url, f"the bucket is not there ({_said(error)})", "create it, or check the name and the endpoint"
        )
    return None


def _says_no_bucket(error: BaseException) -> bool:
    """Decides by its code, since not every server adds words, or by the words; a path may have the word bucket in it."""
    response = getattr(error.__cause__, "response", None)
    code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
    return code == "NoSuchBucket" or "specified bucket does not exist" in str(error).lower()


def _status(error: BaseException) -> int | None:
    for one in (error, error.__cause__):
        response = getattr(one, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if isinstance(status, int):
                return status
        for name in ("status", "code"):  # aiohttp, gcsfs
            status = getattr(one, name, None)
            if isinstance(status, int | str) and str(status).isdigit():
                return int(status)
    return None


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
