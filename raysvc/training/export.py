"""A trained model in the format of Hugging Face, with its tokenizer: what a run leaves to others.

    <folder>/config.json, generation_config.json, *.safetensors     the model
    <folder>/raysvc-digests.json    of its configuration and weights, compared where raysvc reads it
    <folder>/tokenizer.json, tokenizer_config.json, chat_template.jinja    the tokenizer, with the job's template
    <folder>/preprocessor_config.json, ...                          the processor of images, where the tokenizer has one beside it

Always true:
- the folder is there whole or not at all; one that is not empty is never written over by `raysvc export`;
- a checkpoint is read without Ray, whatever number of ranks wrote it;
- the end of a run waits for no import and no tokenizer: they are there since its first step.
"""

from __future__ import annotations

import logging
import shutil
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from raysvc.cache.local.model_digests import write_digests
from raysvc.cache.store.disk_failures import named_failures
from raysvc.cache.store.open import absolute
from raysvc.chat.garbage import no_collection
from raysvc.chat.tokens.tokenizer import LoadedTokenizer
from raysvc.errors import CheckpointDamaged, ConfigError, TokenizerError
from raysvc.evals.eval_decisions import EvalDecisions
from raysvc.job.config import JobConfig, TokenizerConfig
from raysvc.media.media_processor import config_files
from raysvc.training.run_folder import Checkpoint, RunFolder, read_checkpoint, steps_of

log = logging.getLogger(__name__)


def export(job: JobConfig, out: str | Path, step: int | None = None) -> Checkpoint:
    """Write the model of a checkpoint of the job's run into `out`; returns which one it was.

    Args:
        step: steps trained in it; None: the best, where the job has `trainer.keep_best`, else the newest.

    Raises:
        ConfigError: no such checkpoint, or `out` holds something.
        CheckpointDamaged: a file of it is not what was written; no other one is taken instead.
    """
    target = Path(out).expanduser().absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError("--out", f"{target} exists and is not empty", "name a new folder")
    run = RunFolder(absolute(job.run_dir))
    folder = _chosen(run, step, best_steps(job))
    try:
        checkpoint = read_checkpoint(folder)
        write_model(job, target, lambda draft: from_checkpoint(checkpoint, draft))
    except CheckpointDamaged as error:
        earlier = run.before(folder)
        remedy = (
            error.remedy if earlier is None else f"restore it, or export the one before: --step {earlier}"
        )
        raise CheckpointDamaged(error.where, error.what, remedy) from None
    return checkpoint


def write_model(
    job: JobConfig, target: Path, write: Callable[[Path], None], save: Callable[[Path], None] | None = None
) -> None:
    """Let `write` fill a new folder, add the tokenizer's files, and put it in the place of `target`.

    Args:
        save: of `tokenizer_beside`; None: the tokenizer is loaded now.
    """
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        with named_failures(target):
            draft.mkdir(parents=True)
            write(draft)
            write_digests(draft)
        (save or tokenizer_of(job.tokenizer))(draft)
        if target.exists():
            shutil.rmtree(target)
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def best_steps(job: JobConfig) -> int | None:
    """Steps of the best model of a job's run; None where its job keeps none, before its first eval, and where the newest checkpoint,
    which says it, is damaged: then that one is the one to export, and refused.
    """
    try:
        newest = RunFolder(absolute(job.run_dir)).newest() if job.trainer.keep_best else None
    except CheckpointDamaged:
        return None
    return None if newest is None else EvalDecisions.of(job.trainer, newest.state).best_steps


def from_checkpoint(checkpoint: Checkpoint, folder: Path) -> None:
    """Write the model of a checkpoint into a folder, as `transformers` reads it."""
    from raysvc.actors.model.hf_model import export_checkpoint

    export_checkpoint(checkpoint.folder, folder)


def best_checkpoint(run: RunFolder, steps: int) -> Checkpoint:
    """The best checkpoint, which has so many steps.

    Raises:
        ConfigError: it is gone.
        CheckpointDamaged: it is not what was written.
    """
    return read_checkpoint(_chosen(run, None, steps))


def _chosen(run: RunFolder, step: int | None, best: int | None) -> Path:
    """The folder of a checkpoint: of a step, else the best, else the newest."""
    there = {steps_of(folder): folder for folder in run.complete()}
    if not there:
        raise ConfigError("trainer.run_dir", f"{run.path} has no checkpoint", "train first: raysvc train")
    steps = ", ".join(map(str, there))
    if step is None and best is not None and best not in there:
        what = f"the best checkpoint, {best}, is not in {run.path} any more, but {steps}"
        raise ConfigError("trainer.keep_best", what, "name one of these: raysvc export --step")
    chosen = next(one for one in (step, best, max(there)) if one is not None)
    if chosen in there:
        return there[chosen]
    remedy = "name one of these; trainer.keep_checkpoints says how many stay"
    raise ConfigError("--step", f"{run.path} has no checkpoint {step}, but {steps}", remedy)


def tokenizer_beside(config: TokenizerConfig) -> Callable[[Path], None]:
    """Does what `tokenizer_of` does in a thread: its import and the load take seconds. Returns what waits for it, and
    saves.
    """
    done: Future[Callable[[Path], None]] = Future()

    def load() -> None:
        try:
            done.set_result(tokenizer_of(config))
        except BaseException as error:  # noqa: BLE001 - raised where it is saved
            done.set_exception(error)

    threading.Thread(target=load, name="raysvc-tokenizer", daemon=True).start()
    return lambda folder: done.result()(folder)


def tokenizer_of(config: TokenizerConfig) -> Callable[[Path], None]:
    """Load a job's tokenizer; gives what saves its files. One that is gone (all rows came from the cache) costs no model."""
    with no_collection():
        from transformers import AutoTokenizer

    try:
        templates = LoadedTokenizer(config).templates
        tokenizer = AutoTokenizer.from_pretrained(
            config.name, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except (TokenizerError, OSError, ValueError) as error:
        log.warning("the exported model has no tokenizer files: %s", error)
        return lambda folder: None
    if templates:
        only = templates["default"] if set(templates) == {"default"} else templates
        tokenizer.chat_template = only

    processor = config_files(config.name, config.revision)

    def save(folder: Path) -> None:
        tokenizer.save_pretrained(folder)
        for file in processor:
            shutil.copyfile(file, folder / file.name)

    return save
