"""`raysvc demo`: make rows and a tokenizer, then run `raysvc train` on them."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from raysvc.cli.common import Address, AsJson, Verbose, edge
from raysvc.cli.train import show_summary
from raysvc.cli.view import View

Rows = Annotated[int, typer.Option(help="Chat rows to make.", min=64)]
FOLDER = Path(".raysvc/demo")


@edge
def demo(
    rows: Rows = 3000, address: Address = None, as_json: AsJson = False, verbose: Verbose = False
) -> None:
    """Train a tiny model on rows that are made here: the whole data path in about a minute.

    Example: raysvc demo --rows 5000
    """
    from raysvc import trainer
    from raysvc.jobfile import load_job

    job_path = write_job(FOLDER, rows)
    print(f"demo job: {job_path} (run it yourself: raysvc train -c {job_path})", file=sys.stderr)
    job = load_job(job_path)
    if (Path(job.run_dir) / "summary.json").exists():  # a finished demo starts anew, a killed one goes on
        shutil.rmtree(job.run_dir)
    with View() as view:
        summary = trainer.train(job, address=address, progress=view)
    show_summary(job.run_dir, summary, as_json)


def write_job(folder: Path, num_rows: int) -> Path:
    """Write rows, tokenizer and `job.yaml`; the same bytes every time."""
    from raysvc.sample import chat_rows, row_texts, write_rows, write_tokenizer

    data = write_rows(folder / "rows.jsonl", num_rows)
    tokenizer = write_tokenizer(folder / "tokenizer", row_texts(chat_rows(400)))
    job: dict[str, Any] = {
        "source": {"path": str(data), "format": "chat"},
        "tokenizer": str(tokenizer),
        "train_on": "all_assistant_messages",
        "plan": {"batch_size": 64, "mini_batch_size": 32, "epochs": 2, "micro_batch_tokens": 4096},
        "server": {"name": "demo"},
        "trainer": {
            "dp_size": 2,
            "model": "tiny",
            "learning_rate": 3.0e-3,
            "run_dir": "runs/demo",
            "checkpoint_every_steps": 25,
        },
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job, sort_keys=False))
    return path
