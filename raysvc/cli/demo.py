"""`raysvc demo`: make rows and a tokenizer, with pictures where asked for, then run `raysvc train` on them."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from raysvc.cli.common import Address, AsJson, edge
from raysvc.cli.interrupt import asked_to_stop
from raysvc.cli.train import say_if_stopped, show_summary
from raysvc.cli.view import View

Rows = Annotated[int, typer.Option(help="Number of chat rows to generate.", min=64)]
Images = Annotated[bool, typer.Option("--images", help="Rows with pictures, for a tiny vision model.")]
FOLDER = Path(".raysvc/demo")
TRAINER = {"dp_size": 2, "learning_rate": 3.0e-3, "checkpoint_every_steps": 25}


@edge
def demo(rows: Rows = 3000, images: Images = False, address: Address = None, as_json: AsJson = False) -> None:
    """Train a tiny model on synthetic rows, end to end.

    Example: raysvc demo --rows 5000
    """
    from raysvc.job.job_file import load_job
    from raysvc.training.train import train as run_job

    job_path = write_image_job(Path(f"{FOLDER}-images"), rows) if images else write_job(FOLDER, rows)
    print(f"demo job: {job_path} (run it yourself: raysvc train {job_path})", file=sys.stderr)
    job = load_job(job_path)
    if (Path(job.run_dir) / "summary.json").exists():  # a finished demo starts again, a killed one goes on
        shutil.rmtree(job.run_dir)
    with View() as view:
        result = run_job(job, address=address, progress=view, should_stop=asked_to_stop)
    show_summary(job.run_dir, result.metrics, as_json)
    say_if_stopped(result.global_step)


def write_job(folder: Path, num_rows: int) -> Path:
    """Write rows, tokenizer and `job.yaml`; the same bytes every time."""
    from raysvc.cli import sample_data

    trainer = {**TRAINER, "model": "tiny", "run_dir": "runs/demo"}
    plan = {"batch_size": 64, "mini_batch_size": 32, "epochs": 2, "micro_batch_tokens": 4096}
    return sample_data.write_job(folder, num_rows, plan=plan, server={"name": "demo"}, trainer=trainer)


def write_image_job(folder: Path, num_rows: int) -> Path:
    """Does what `write_job` does, with rows that have pictures."""
    from raysvc.cli import demo_images

    trainer = {**TRAINER, "model": "tiny-vision", "run_dir": "runs/demo-images"}
    plan = {"batch_size": 32, "epochs": 2, "layout": "packed", "micro_batch_tokens": 1024}
    return demo_images.write_image_job(
        folder, num_rows, plan=plan, server={"name": "demo-images"}, trainer=trainer
    )
