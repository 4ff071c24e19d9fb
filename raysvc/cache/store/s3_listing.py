"""Listing a folder of S3 without most of the names that begin alike.

1. Ask for a page of names, in their order.
2. Where it ends inside of names that may be left out, go on behind the last name that begins so.

Always true:
- every other name is there; a folder of one page costs one request, and of any size one more for each beginning.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from raysvc.cache.store.store import Found


def few_names(fs: Any, base: str, few_of: tuple[str, ...]) -> Iterator[Found]:
    """Returns what lies directly in a folder.

    Args:
        fs: s3fs.
        base: bucket and folder.
        few_of: beginnings of names that may be left out.
    """
    bucket, key, _ = fs.split_path(base)
    folder = f"{key}/" if key else ""
    after = folder
    while True:
        page = fs.call_s3("list_objects_v2", Bucket=bucket, Prefix=folder, Delimiter="/", StartAfter=after)
        for item in page.get("Contents", ()):
            if name := item["Key"][len(folder) :]:
                yield Found(name, item["Size"], item["LastModified"].timestamp(), False)
        if not page["IsTruncated"]:
            return
        last = page["Contents"][-1]["Key"][len(folder) :]
        many = next((start for start in few_of if last.startswith(start)), None)
        after = folder + (last if many is None else f"{many}\x7f")
