"""The Ray Data graph of a build: slices -> tokenize and write -> receipts.

Read top to bottom. The driver sends descriptions of slices and gets receipts back; rows and tokens
stay in the tasks that read, tokenize and write them. A task that is run again writes the same part.

Always true:
- one slice is one task and one part;
- a slice whose receipt is in the store is not done again.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from raysvc.cache.manifest import Receipt
from raysvc.cache.store.store import Store
from raysvc.cache.writer import EntryWriter
from raysvc.chat.row_counter import FirstRows
from raysvc.chat.row_counts import Quarantined, RowCounts, errors_of
from raysvc.chat.slice_tokenizer import SliceResult, SliceTokenizer
from raysvc.chat.tokens.tokenizer import LoadedTokenizer
from raysvc.job.config import PoolConfig, TextSpec
from raysvc.media.media_desk import MediaDesk
from raysvc.media.media_processor import MediaProcessor
from raysvc.media.reference import AllowedPlaces
from raysvc.pipelines.reading.media_files import folder_of, read_media_file
from raysvc.pipelines.reading.readers import has_long_line, read_lines, read_rows
from raysvc.pipelines.slice_graph import WorkerPool, answers, receipts_from, slice_graph
from raysvc.pipelines.sources.slices import Slice

if TYPE_CHECKING:
    import ray.data

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuildTask:
    """Holds what every worker of a build knows.

    Attributes:
        spec: what decides the tokens.
        writer: of the entry that is built.
        storage_options: to read the source with.
        max_quarantine: share of rows; a build whose first rows are nearly all quarantined ends there.
        niceness: of its workers; a run that trains beside the build goes first where both want a core.
        name: of a mixture's source; errors tell it.
    """

    spec: TextSpec
    writer: EntryWriter
    storage_options: dict[str, Any]
    max_quarantine: float
    niceness: int = 0
    name: str = ""


SlicesLeft = Sequence[tuple[int, Slice]]  # of some builds: number of the build, and slice


class SliceMaker:
    """Reads, tokenizes and writes slices of some builds; each tokenizer is loaded once.

    Args:
        tasks: of the builds.
        loaded: tokenizer and media processor of each, where the process has them.
    """

    def __init__(
        self,
        tasks: Sequence[BuildTask],
        loaded: Sequence[tuple[LoadedTokenizer, MediaProcessor | None]] = (),
    ) -> None:
        self._tasks, self._loaded = tasks, loaded
        self._tokenizers: dict[int, SliceTokenizer] = {}  # by number of the task

    def build(self, number: int, piece: Slice) -> Receipt:
        """Make a slice of a task."""
        task = self._tasks[number]
        with errors_of(task.name):
            return build_slice(task, self.tokenizer(number), piece)

    def tokenizer(self, number: int) -> SliceTokenizer:
        """That of a task."""
        if number not in self._tokenizers:
            self._tokenizers[number] = self._new_tokenizer(number)
        return self._tokenizers[number]

    def _new_tokenizer(self, number: int) -> SliceTokenizer:
        task = self._tasks[number]
        spec = task.spec
        tokenizer, processor = self._loaded[number] if self._loaded else (None, None)
        desk = desk_of(spec, task.writer.store, task.storage_options, processor) if spec.media else None
        known = (one.tokenizer for one in self._tokenizers.values() if one.spec.tokenizer == spec.tokenizer)
        return SliceTokenizer(spec, tokenizer=next(known, tokenizer), desk=desk)


class SliceWorker(SliceMaker):
    """Makes slices in a Ray Data actor, which has one core."""

    def __init__(self, tasks: Sequence[BuildTask]) -> None:
        # threads of the encoder would only fight the other actors
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        os.environ["RAYON_NUM_THREADS"] = "1"
        os.nice(max(task.niceness for task in tasks))  # Linux: of this thread and of those that it starts
        super().__init__(tasks)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return answers(
            batch["slice"],
            lambda piece: self.build(piece[0], Slice.from_json(piece[1])),
        )


def build_slice(task: BuildTask, tokenizer: SliceTokenizer, piece: Slice) -> Receipt:
    """Read, tokenize and write one slice: what a build does in a worker, or in the process that asks."""
    began_s = time.time()
    first_rows = FirstRows(task.max_quarantine, before=piece.first_row)
    result = tokenize_slice(tokenizer, piece, task.storage_options, first_rows)
    return write_slice(task, tokenizer, piece, result, began_s)


def write_slice(
    task: BuildTask, tokenizer: SliceTokenizer, piece: Slice, result: SliceResult, began_s: float
) -> Receipt:
    """Make a tokenized slice durable."""
    if tokenizer.desk is not None:
        tokenizer.desk.settle()  # the part names its media
    meta = part_meta(piece, result, worker_of(began_s))
    return task.writer.write_part(piece.index, result.table, meta)


def desk_of(
    spec: TextSpec,
    store: Store | None,
    storage_options: dict[str, Any],
    processor: MediaProcessor | None = None,
) -> MediaDesk:
    """Returns what takes the media of a source.

    Args:
        spec: names the processor.
        store: where their bytes are kept; None: nowhere.
        storage_options: to read them with.
        processor: where it is loaded already.

    Raises:
        TokenizerError: there is no processor of media.
    """
    name = spec.tokenizer
    loaded = processor or MediaProcessor.load(name.name, name.revision, name.trust_remote_code, spec.media)

    def fetch(reference: str, folder: str, most: int) -> bytes:
        return read_media_file(reference, AllowedPlaces(folder, spec.media_allow), most, storage_options)

    return MediaDesk(loaded, store, fetch)


def worker_of(began_s: float) -> dict[str, Any]:
    """Tells who made a slice, when, and how long it took, for the progress of a build."""
    return {
        "host": platform.node(),
        "pid": os.getpid(),
        "began_s": round(began_s, 3),
        "seconds": round(time.time() - began_s, 3),
    }


def tokenize_slice(
    tokenizer: SliceTokenizer,
    piece: Slice,
    storage_options: dict[str, Any],
    first_rows: FirstRows | None = None,
) -> SliceResult:
    """Read and tokenize one slice."""
    if tokenizer.desk is not None:
        tokenizer.desk.folder_of = lambda source_row: folder_of(piece.path_of(source_row))
    if piece.is_lines and not has_long_line(piece):
        return tokenizer.run_json_lines(read_lines(piece, storage_options), piece.first_row, first_rows)
    return tokenizer.run(read_rows(piece, storage_options), first_rows)


def part_meta(piece: Slice, result: SliceResult, worker: dict[str, Any]) -> dict[str, Any]:
    """Returns what a receipt remembers of its slice, so that a later builder can tell and report it."""
    return {
        "slice": piece.identity(),
        "row_counts": result.row_counts.to_json(),
        "examples": [asdict(example) for example in result.examples],
        "encoder": result.encoder,
        "switched": result.switched,
        "sampled": result.sampled,
        "left_out": list(result.left_out),
        "text_widths": dict(result.text_widths),
        **({"media": list(result.media)} if result.media else {}),
        "worker": worker,
    }


def split_done(writer: EntryWriter, slices: Sequence[Slice]) -> tuple[dict[int, Receipt], list[Slice]]:
    """Receipts of an earlier builder that still fit, and the slices that are left to do."""
    wanted = {piece.index: piece.identity() for piece in slices}

    def fits(receipt: Receipt) -> bool:
        return receipt.meta.get("slice") == wanted.get(receipt.slice_index, 0) and is_usable(receipt.meta)

    done = writer.receipts(fits)
    return done, [piece for piece in slices if piece.index not in done]


def is_usable(meta: Mapping[str, Any]) -> bool:
    """Returns whether a receipt's maker left all that the report is made of."""
    try:
        RowCounts(**meta["row_counts"]).check()
        for item in meta["examples"]:
            Quarantined(**item)
        types = (type(meta["sampled"]), type(meta["encoder"]), type(meta["switched"]))
    except (KeyError, TypeError, ValueError, AttributeError, AssertionError):
        return False
    return types == (int, str, str)


def receipts_of(
    tasks: Sequence[BuildTask], left: SlicesLeft, pool: PoolConfig
) -> Iterator[tuple[int, Receipt]]:
    """Run the graph over what nobody has done by now; receipts come as slices finish, in any order.

    Args:
        tasks: whose entries are built.
        left: slices of them, those first that are needed first.
        pool: workers.

    Raises:
        RaysvcError: what a task raised on purpose, as it was raised there.
    """
    done, left = _still_left(tasks, left)
    yield from done
    if left:
        yield from ((piece[0], receipt) for piece, receipt in receipts_from(build_graph(tasks, left, pool)))


def receipts_here(tasks: Sequence[BuildTask], left: SlicesLeft) -> Iterator[tuple[int, Receipt]]:
    """The same without workers: in this process and on one core, one slice after the other."""
    done, left = _still_left(tasks, left)
    yield from done
    worker = SliceWorker(tasks)
    for number, piece in left:
        yield number, worker.build(number, piece)


def build_graph(tasks: Sequence[BuildTask], left: SlicesLeft, pool: PoolConfig) -> ray.data.Dataset:
    """The Ray Data graph over some slices; lazy."""
    pieces = [(number, piece.to_json()) for number, piece in left]
    return slice_graph(SliceWorker, tuple(tasks), pieces, WorkerPool.of(pool))


def _still_left(tasks: Sequence[BuildTask], left: SlicesLeft) -> tuple[list[tuple[int, Receipt]], SlicesLeft]:
    done: list[tuple[int, Receipt]] = []
    for number, task in enumerate(tasks):
        found, _ = split_done(task.writer, [piece for one, piece in left if one == number])
        done += ((number, receipt) for receipt in found.values())
    known = {(number, receipt.slice_index) for number, receipt in done}
    return done, [(number, piece) for number, piece in left if (number, piece.index) not in known]
