"""`raysvc export`: a checkpoint as a model that `transformers` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raysvc.cli.common import AsJson, Job, Overrides, edge, emit
from raysvc.cli.named_run import job_that_ran

Out = Annotated[Path, typer.Option(help="Folder to write; must not exist.", metavar="DIR")]
Step = Annotated[
    int | None,
    typer.Option(
        help="Export the checkpoint of this step. Default: the best, with trainer.keep_best, else the newest.",
        min=0,
    ),
]


@edge
def export(
    out: Out,
    config: Job = "job.yaml",
    overrides: Overrides = None,
    step: Step = None,
    as_json: AsJson = False,
) -> None:
    """Export a checkpoint as a Hugging Face model.

    The folder holds safetensors and the tokenizer, for AutoModelForCausalLM.from_pretrained. Needs no Ray.

    Example: raysvc export job.yaml --step 100 --out model-100
    """
    from raysvc.training.export import best_steps
    from raysvc.training.export import export as write

    job = job_that_ran(config, overrides).job
    checkpoint = write(job, out, step)
    if as_json:
        emit({"model": str(out.absolute()), "step": checkpoint.step})
    else:
        best = ", the best" if checkpoint.step == best_steps(job) else ""
        print(f"model of step {checkpoint.step}{best}: {out}")
