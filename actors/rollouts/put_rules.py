"""Decides what becomes of each group of a put: refused, known already, new, or the next part of one that grows. Pure.

Always true:
- a part of a group continues its rows: none left out, and none twice;
- a weight version that no weights can have yet is refused;
- rows that were put before are cut off: putting them again changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from raysvc.actors.rollouts.group_pool import Key, Pool
from raysvc.actors.rollouts.group_rows import GroupRows
from raysvc.errors import SourceError
from raysvc.rl.schema import GroupSpan


def is_full(pool: Pool, spans: Sequence[GroupSpan], frontier: int) -> bool:
    """Tells whether there is no room for a new group of these that was not reserved."""
    new = [span for span in spans if not pool.is_known(span.key)]
    return pool.capacity(frontier) == 0 and any(s.key[0] not in pool.reserved for s in new)


def refuse(pool: Pool, groups: Mapping[Key, GroupRows], spans: Sequence[GroupSpan]) -> None:
    """Refuse a put whose rows leave a gap, or whose weights cannot be.

    Raises:
        SourceError: names the group and the rule.
    """
    for span in spans:
        where, group = f"group {span.key[0]!r}", groups.get(span.key)
        if pool.is_known(span.key) and (group is None or group.closed):
            continue
        known = group.num_rows if group else 0
        if span.first > known:
            what = f"begins at row {span.first}, and {known} rows of it were put"
            raise SourceError(where, what, "put its rows in order, none left out")
        if (reason := pool.refuse_version(span.newest)) is not None:
            raise SourceError(where, reason, "tell set_weight_version first, or correct the group")


def unknown_part(
    pool: Pool, groups: Mapping[Key, GroupRows], span: GroupSpan, versions_N: npt.NDArray[np.int64]
) -> GroupSpan | None:
    """Returns what of a span is not known yet, as old as its own rows; None for nothing.

    Args:
        versions_N: weight versions of the N rows of the table.
    """
    group = groups.get(span.key)
    if not pool.is_known(span.key):
        return span
    if group is None or group.closed or span.key not in pool.waiting:
        return None
    cut = max(0, group.num_rows - span.first)
    rest = span._replace(start=span.start + cut, first=span.first + cut)
    if rest.start >= rest.stop:
        return rest if span.closed else None
    own = versions_N[rest.start : rest.stop]
    return rest._replace(version=int(own.max() if pool.withholds else own.min()))
