"""Finds the files of a source.

Always true:
- files are sorted within each pattern, and one that is named twice is refused: its rows would come once;
- a listing is fresh: what fsspec remembers of an earlier one is dropped first;
- a store that does not answer is an error in `FIRST_ANSWER_S`;
- names that begin with a dot or an underscore, and what lies in such folders, are no rows, unless the pattern says so;
- symbolic links to folders are followed, each folder once; a link that leads nowhere is an error;
- a file that is removed while a folder is listed is not there;
- the files of a folder are of one kind.
"""

from __future__ import annotations

import contextlib
import glob
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from raysvc.errors import RaysvcError, SourceError
from raysvc.job.config import SourceConfig
from raysvc.pipelines.reading.pinned_file import file_system
from raysvc.pipelines.sources.file_stamp import listed_stamp, store_tag
from raysvc.pipelines.sources.files import ENDINGS, SourceFile, known_kind, resolve_path
from raysvc.redact import redacted

T = TypeVar("T")
FIRST_ANSWER_S = 10.0
WEB_ANSWER_S = 30.0  # a web server may make the file while it is asked for it
HIDDEN = (".", "_")
SAVED = ("state.json", "dataset_dict.json")  # what `save_to_disk` of `datasets` writes into its folders


def find_files(config: SourceConfig, may_be_none: bool = False) -> list[SourceFile]:
    """The files of `source.path`, sorted within each pattern.

    Args:
        may_be_none: a pattern may match nothing.

    Raises:
        SourceError: a pattern matches nothing, a file is named twice, or a folder holds no file of a known kind, or several kinds.
    """
    found: dict[str, SourceFile] = {}
    for pattern in config.path:
        files = _expand(pattern, config.storage_options)
        if not files and not may_be_none:
            relative = resolve_path(pattern) not in (pattern, pattern.removeprefix("file://"))
            here = f" (it is looked for as {resolve_path(pattern)})" if relative else ""
            raise SourceError(
                "source.path", f"{pattern!r} matches no file{here}", f"name files that end in {ENDINGS}"
            )
        for file in files:
            place = file.path if "://" in file.path else os.path.normpath(file.path)
            if place in found:
                raise _named_twice(file, config.path)
            found[place] = file
    return list(found.values())


def _named_twice(file: SourceFile, patterns: tuple[str, ...]) -> SourceError:
    """Nobody can tell whether its rows were meant to count twice."""
    what = f"names {redacted(file.path)!r} more than once ({', '.join(map(redacted, patterns))})"
    return SourceError("source.path", what, "name it once; plan.epochs, or a weight of mixture, repeats rows")


def _expand(pattern: str, storage_options: dict[str, Any]) -> list[SourceFile]:
    path = resolve_path(pattern)
    try:
        if "://" not in path:
            return _local(pattern, path)
        return _remote(pattern, path, storage_options)
    except RaysvcError:
        raise
    except Exception as error:  # noqa: BLE001 - every store has errors of its own
        told = str(error.__cause__ or "") or str(
            error
        )  # fsspec says just the URL of what a web server answers
        text = redacted(told).strip().split("\n")[0]
        raise SourceError(
            "source.path", f"{pattern!r} cannot be listed: {text}", "check the URL and credentials"
        ) from (error if redacted(pattern) == pattern else None)


def _local(pattern: str, path: str) -> list[SourceFile]:
    if os.path.isdir(path):
        return _of_folder(pattern, path, _walk(path, set()))
    if os.path.exists(path) or not glob.has_magic(path):
        return [_local_file(path)] if _is_rows(path) else []
    names = glob.iglob(path, recursive=True, include_hidden=True)
    return list(_there(name for name in sorted(names) if not _hidden(path, name) and _is_rows(name)))


def _there(paths: Iterable[str]) -> Iterator[SourceFile]:
    """The files, without those that were removed since they were listed."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            yield _local_file(path)


def _walk(folder: str, above: set[tuple[int, int]]) -> Iterator[SourceFile]:
    try:
        status = os.stat(folder)
        with os.scandir(folder) as found:
            items = sorted(found, key=lambda item: item.name)
    except FileNotFoundError:
        return  # removed since the folder above was listed
    place = (status.st_dev, status.st_ino)
    if place in above:  # a link to a folder that was looked through already
        return
    above.add(place)
    for item in items:
        if item.name.startswith(HIDDEN):
            continue
        if item.is_dir():
            yield from _walk(item.path, above)
        elif (known_kind(item.name) or item.name in SAVED) and _is_rows(item.path):
            yield from _there([item.path])


def _is_rows(path: str) -> bool:
    """Returns whether it is a plain file.

    Raises:
        SourceError: a link that leads nowhere: its rows would be missing without a word.
    """
    if os.path.islink(path) and not os.path.exists(path):
        what = f"{path!r} is a link to a file that is not there"
        raise SourceError("source.path", what, "fix the link or remove it")
    return os.path.isfile(path)


def _local_file(path: str) -> SourceFile:
    return SourceFile(path, os.stat(path).st_size, None)


def _remote(pattern: str, path: str, storage_options: dict[str, Any]) -> list[SourceFile]:
    fs, root = file_system(path, storage_options)
    fs.invalidate_cache()
    if path.startswith(("http://", "https://")) and "*" not in path and not path.endswith("/"):
        info = _answer(path, lambda: fs.info(root), WEB_ANSWER_S)
        return [_remote_file(path, info)]  # a web server shows its folders only as pages
    if _answer(path, lambda: fs.isdir(root), FIRST_ANSWER_S):
        found = fs.find(root, detail=True)
        names = [name for name in sorted(found) if not _hidden(f"{root.rstrip('/')}/*", name)]
        files = [_remote_file(fs.unstrip_protocol(name), found[name]) for name in names]
        return _of_folder(pattern, root, (one for one in files if known_kind(one.path)))
    found = fs.glob(root, detail=True)
    names = [name for name in sorted(found) if found[name]["type"] != "directory" and not _hidden(root, name)]
    return [_remote_file(fs.unstrip_protocol(name), found[name]) for name in names]


def _answer(path: str, ask: Callable[[], T], limit_s: float) -> T:
    """The answer to a first, cheap request; a store that is dead is left to itself.

    Raises:
        SourceError: none in time.
    """
    answers: queue.SimpleQueue[Future[T]] = queue.SimpleQueue()

    def attempt() -> None:
        answer: Future[T] = Future()
        try:
            answer.set_result(ask())
        except Exception as error:  # noqa: BLE001  raised where it is waited for
            answer.set_exception(error)
        answers.put(answer)

    threading.Thread(target=attempt, name="raysvc-source-answer", daemon=True).start()
    try:
        return answers.get(timeout=limit_s).result()
    except queue.Empty:
        what = f"{path!r} did not answer in {limit_s:.0f} s"
        raise SourceError("source.path", what, "check the address and the network") from None


def _remote_file(path: str, info: dict[str, Any]) -> SourceFile:
    return SourceFile(path, int(info.get("size") or 0), store_tag(path, info), listed_stamp(info))


def _hidden(pattern: str, name: str) -> bool:
    """Returns whether a part of the name that the pattern leaves open begins with a dot or an underscore."""
    parts = pattern.split("/")
    first = next((place for place, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    if any(part.startswith(HIDDEN) for part in parts[first:]):
        return False
    return any(part.startswith(HIDDEN) for part in name.split("/")[first:])


def _of_folder(pattern: str, root: str, files: Iterable[SourceFile]) -> list[SourceFile]:
    """The files of a folder, of one kind.

    Raises:
        SourceError: they are of several kinds, or `save_to_disk` wrote a folder below.
    """
    chosen = list(files)
    saved = [os.path.dirname(file.path) for file in chosen if os.path.basename(file.path) in SAVED]
    if saved:
        what = f"{pattern!r} holds {saved[0]!r}, which save_to_disk of datasets wrote"
        raise SourceError("source.path", what, "name that folder in source.dataset, or its *.arrow files")
    examples: dict[str, str] = {}
    for file in chosen:
        examples.setdefault(known_kind(file.path) or "", os.path.basename(file.path))
    if len(examples) > 1:
        kinds = ", ".join(f"{kind} ({name})" for kind, name in sorted(examples.items()))
        what = f"{pattern!r} holds files of several kinds: {kinds}"
        raise SourceError("source.path", what, "name one kind, such as '*.jsonl' in that folder")
    return chosen
