"""Looks at `trainer.model` before anything is built for it, and at what it is to see."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from raysvc import hub
from raysvc.actors.model.load_model import check_folder, check_media_model, has_weights, read_config
from raysvc.actors.model.model_layout import layout_proof, scaling_of
from raysvc.actors.model.tiny_vision import NAME as TINY_VISION
from raysvc.actors.model.tiny_vision import TinyVision
from raysvc.errors import ConfigError
from raysvc.job.config import PAIRED

if TYPE_CHECKING:
    from raysvc.actors.model.shared_scaling import SharedScaling
    from raysvc.builds.cache_entry import CacheEntry
    from raysvc.job.config import JobConfig

log = logging.getLogger(__name__)


def check_model(name: str, *, alone: bool = False) -> None:
    """Refuse a hub name or a folder that is no model; absolute folders may be of the workers' nodes alone.

    Args:
        alone: the workers run on this machine alone.

    Raises:
        ConfigError: it cannot be loaded.
    """
    folder = Path(name).expanduser()
    if name in ("tiny", TINY_VISION) or (folder.is_absolute() and not alone):
        return
    check_folder(folder, name, "trainer.model")
    with nullcontext() if folder.is_dir() else hub.answering():
        read_config(name)
    if folder.is_dir() and not has_weights(name):
        what = f"{name} holds no weights"
        raise ConfigError("trainer.model", what, "give a folder that save_pretrained wrote, or tiny")


def check_layout(job: JobConfig, ray_there: Future[str] | None) -> None:
    """Refuse a layout in which the model's rows would see each other, as far as a tiny model of the same architecture can say.

    What it cannot say, the workers say when they have loaded the model. It runs on a CPU: a model that has kernels for
    packed rows on a GPU is left to them, where they may have one.

    Args:
        ray_there: Ray, which may still be starting; None: it is asked for later, and this is asked again then.

    Raises:
        ConfigError: no inputs that the architecture takes keep the rows apart.
    """
    name, layout = job.trainer.model, job.plan.layout
    proof = layout_proof(name, layout)
    if proof is None or proof.inputs is not None:
        return
    from raysvc.actors.model.model_inputs import BOUNDARIES
    from raysvc.actors.model.row_isolation import mixes_rows

    refusal = mixes_rows(name, layout, proof)
    if BOUNDARIES not in proof.raised or not _may_have_gpus(job, ray_there):
        raise refusal
    if ray_there is not None:
        log.warning("on a CPU, %s; the workers try it where they run", refusal)


def check_scaling(job: JobConfig, entry: CacheEntry) -> None:
    """Refuse rows that change the positions of the rows beside them; see `shared_scaling`.

    Args:
        entry: whose rows are all there.

    Raises:
        ConfigError: some rows are longer than the original context, and share micro-batches with others.
    """

    scaling = _scaling_of(job)
    if scaling is None:
        return
    paired = any(one.recipe.get("format") in PAIRED for one in entry.entries)
    if job.plan.micro_batch_size == 1 and scaling.kind == "longrope" and not paired:
        return
    beyond = scaling.mixes(entry.rows.lengths())
    if beyond:
        raise ConfigError("trainer.model", scaling.told(f"{beyond} rows are"), scaling.remedy)


def warn_of_scaling(job: JobConfig) -> None:
    """Does what `check_scaling` does, for rows that are tokenized while they are trained."""
    scaling, most = _scaling_of(job), job.max_length
    if scaling is not None and (most is None or most > scaling.context):
        log.warning("trainer.model %s; %s", scaling.told("rows may be"), scaling.remedy)


def _scaling_of(job: JobConfig) -> SharedScaling | None:
    """None for `stream`, whose lines are of one length."""
    return None if job.plan.layout == "stream" else scaling_of(job.trainer.model)


def _may_have_gpus(job: JobConfig, ray_there: Future[str] | None) -> bool:
    if job.trainer.device != "auto" or ray_there is None:
        return job.trainer.device != "cpu"
    import ray

    ray_there.result()
    return bool(ray.cluster_resources().get("GPU", 0))


def vision_of(job: JobConfig, entry: CacheEntry) -> TinyVision | None:
    """Returns what `tiny-vision` sees; None of any other model.

    Raises:
        ConfigError: `tiny` for rows with media, `tiny-vision` for rows without or that it cannot see, or a model that was not
            proved to train on media.
    """

    recipes = [one.recipe for one in entry.entries]
    processors = [one["media"]["processor"] for one in recipes if "media" in one]
    name = job.trainer.model
    if name == "tiny" and processors:
        remedy = f"give {TINY_VISION} for images and videos, or the model of the processor"
        raise ConfigError("trainer.model", "tiny reads text alone, and the rows have media", remedy)
    if name != TINY_VISION:
        if processors:
            _check_media(name)
        return None
    if not processors:
        raise ConfigError("trainer.model", f"{name} is for rows with media, and these have none", "give tiny")
    if job.trainer.objective in ("reward", "process"):
        what = f"{name} has no head for {job.trainer.objective}"
        raise ConfigError("trainer.model", what, "choose another objective, or a model")
    return TinyVision.of(processors[0], entry.tokenizer.backend_tokenizer.token_to_id)


def _check_media(name: str) -> None:
    """See `check_media_model`; of a folder that only the workers see, the first step says it."""
    folder = Path(name).expanduser()
    if folder.is_dir() or not folder.is_absolute():
        with hub.answering():
            check_media_model(read_config(name).model_type)
