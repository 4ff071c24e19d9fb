"""Keeps the job of a run folder, in `<run_dir>/run.json`, written before the first step.

Always true:
- of processes that write it at the same time one wins, and the others stop;
- a changed byte of it is found: it is no other job then, but a damaged file;
- what decides rows, order or weights is compared field by field; ranks, devices and micro-batches may change;
- a folder of another job is refused before anything in it is written, with every field that differs;
- the fields of `CHANGEABLE` may differ where the user says so (`trainer.resume: changed`).
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysvc.builds.job_plan import plan_of
from raysvc.cache.local.sealed import opened, sealed
from raysvc.cache.store.disk_failures import named_failures
from raysvc.cache.store.open import open_store
from raysvc.errors import StateMismatch
from raysvc.evals.held_rows import held_out

if TYPE_CHECKING:
    from raysvc.builds.cache_entry import CacheEntry
    from raysvc.job.config import JobConfig

FILE = "run.json"
FIXED = ("model", "loss", "loss_constant", "precision", "seed")
CHANGEABLE = ("learning_rate", "lr_schedule", "warmup_steps", "weight_decay", "max_grad_norm", "max_steps")
KEYS = "plan.entry_keys"
EPOCHS = "plan.epochs"
STOP = "trainer.stop_after"  # only where it is given


def identity_of(job: JobConfig, entry: CacheEntry) -> dict[str, Any]:
    """Dotted key -> value of all that decides rows, order and weights of a run, in JSON's types."""
    trainer = {f"trainer.{name}": getattr(job.trainer, name) for name in (*FIXED, *CHANGEABLE)}
    plan = {f"plan.{name}": value for name, value in plan_of(job, entry).identity.items()}
    adapt = job.mixture.adapt if job.mixture else None
    adapts = {} if adapt is None else {"mixture.adapt": adapt.model_dump()}
    stop = job.trainer.stop_after
    stops = {} if stop is None else {STOP: stop.model_dump()}
    held_there = held_out(job)
    held = {} if held_there is None else {held_there.where: held_there.size}
    decides = {**plan, EPOCHS: job.plan.epochs, **trainer, **adapts, **stops, **held}
    identity: dict[str, Any] = json.loads(json.dumps(decides))
    return identity


def claim(folder: Path, identity: Mapping[str, Any], *, has_checkpoint: bool, changed: bool) -> None:
    """Write the identity of a run into its folder, or compare it with the one that is there.

    Args:
        folder: the run's.
        identity: of the job that wants to run there.
        has_checkpoint: whether there is something to resume.
        changed: whether fields of `CHANGEABLE`, the number of epochs and `trainer.stop_after` may differ.

    Raises:
        StateMismatch: the folder belongs to another job, or another process wrote there meanwhile.
    """
    found = _found(folder)
    known = _known(found)
    if known is None and has_checkpoint:
        what = "is missing or damaged, and says of which job the checkpoints here are"
        remedy = "restore it, give another trainer.run_dir, or trainer.resume=false"
        raise StateMismatch(str(folder / FILE), what, remedy)
    if known is not None and has_checkpoint:
        _refuse_another(folder, known, identity, changed)
    if known != identity:
        _write(folder, identity, found)


def identity_in(folder: Path) -> dict[str, Any] | None:
    """The identity of the run in a folder; None where it is missing or damaged."""
    return _known(_found(folder))


def _short(name: str, value: Any) -> str:
    """Returns the value as text; keys of cache entries by their first characters."""
    return repr([key[:16] for key in value] if name == KEYS and isinstance(value, list) else value)


def _refuse_another(
    folder: Path, known: Mapping[str, Any], identity: Mapping[str, Any], changed: bool
) -> None:
    differ = [name for name in sorted({*known, *identity}) if known.get(name) != identity.get(name)]
    changeable = {EPOCHS, STOP, *(f"trainer.{name}" for name in CHANGEABLE)}
    if not differ or (changed and set(differ) <= changeable):
        return
    fields = "; ".join(
        f"{name} was {_short(name, known.get(name))} and is {_short(name, identity.get(name))}"
        for name in differ
    )
    remedy = "give another trainer.run_dir, or trainer.resume=false to start again"
    if set(differ) <= changeable:
        remedy = "give trainer.resume=changed to go on with these values, or another trainer.run_dir"
    raise StateMismatch(str(folder), f"holds another run: {fields}", remedy)


def _found(folder: Path) -> bytes | None:
    try:
        return (folder / FILE).read_bytes()
    except OSError:
        return None


def _known(found: bytes | None) -> dict[str, Any] | None:
    try:
        return None if found is None else opened(found)
    except ValueError:
        return None


def _write(folder: Path, identity: Mapping[str, Any], found: bytes | None) -> None:
    """Write it in the place of what was found there; who writes at the same time loses, or this one does."""
    folder.mkdir(parents=True, exist_ok=True)
    path, aside = folder / FILE, folder / f".{FILE}.{uuid.uuid4().hex[:8]}"
    with named_failures(path):
        if found is not None:
            with suppress(FileNotFoundError):
                path.rename(aside)
            if _is(aside, found):
                aside.unlink()
            else:
                with suppress(FileNotFoundError, FileExistsError):
                    os.link(aside, path)
                raise _raced(folder)
        if not open_store(str(folder)).create(FILE, sealed(identity)):
            raise _raced(folder)


def _is(path: Path, content: bytes) -> bool:
    return path.exists() and path.read_bytes() == content


def _raced(folder: Path) -> StateMismatch:
    what = "another process began a run in it just now"
    return StateMismatch(str(folder), what, "run the same command again, or give another trainer.run_dir")
