"""A pytest plugin that makes threads of ours late, so that a test which does not wait for them fails each time.

    python tests/hunt.py tests/cache/test_gc.py --times 1 --late

A thread of the package begins half a second after it was started, and the mark of a reader that nobody refers to any
more ends three seconds after that: longer, so that what waits for the one does not wait for the other by accident.
"""

from __future__ import annotations

import threading
import time
from typing import Any

BEGINS_LATE_S, ENDS_LATE_S = 0.5, 3.0


def pytest_configure() -> None:
    from raysvc.cache import use_marker

    begin, end_dropped = threading.Thread.run, use_marker._Keeper._round

    def late_run(self: Any) -> None:
        if str(getattr(getattr(self, "_target", None), "__module__", "")).startswith("raysvc"):
            time.sleep(BEGINS_LATE_S)
        begin(self)

    def late_round(self: Any, renew: bool) -> None:
        if self._dropped:
            time.sleep(ENDS_LATE_S)
        end_dropped(self, renew)

    threading.Thread.run = late_run  # type: ignore[method-assign]
    use_marker._Keeper._round = late_round  # type: ignore[method-assign]
