"""`raysvc init`: a first job.yaml from rows and a tokenizer."""

from __future__ import annotations

import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from raysvc.cli.common import AsJson, edge, emit


class Host(StrEnum):
    """Trainers that a script is written for."""

    trl = "trl"
    transformers = "transformers"
    torch = "torch"


Data = Annotated[str, typer.Argument(help="A file, a glob or a folder of rows; or dataset_info.json:NAME.")]
Tokenizer = Annotated[str, typer.Option(help="Tokenizer folder or hub name.")]
Out = Annotated[Path, typer.Option(help="Job file to write.", metavar="JOB.YAML")]
Trainer = Annotated[Host | None, typer.Option(help="Write a script too, which trains the job there.")]
Settings = Annotated[
    list[str] | None,
    typer.Argument(
        help="source.columns.OURS=THEIRS or source.roles.THEIRS=OURS, where the rows have other names; tokenizer.chat_template=FILE; train_on=WHAT.",
        metavar="[KEY=VALUE]...",
    ),
]
NAMES = ("source.columns.", "source.roles.", "tokenizer.", "train_on=")


@edge
def init(
    data: Data,
    tokenizer: Tokenizer,
    settings: Settings = None,
    out: Out = Path("job.yaml"),
    trainer: Trainer = None,
    as_json: AsJson = False,
) -> None:
    """Write a commented job.yaml for a file of rows.

    It looks at the rows, picks the format and says what it saw. A JSON schema for editors is written beside it.
    dataset_info.json:NAME is an entry of LLaMA-Factory's file: its columns, tags and ranking go into the job.

    Example: raysvc init rows.jsonl --tokenizer Qwen/Qwen2.5-0.5B

    Example: raysvc init rows.jsonl --tokenizer Qwen/Qwen2.5-0.5B --trainer trl

    Example: raysvc init rows.jsonl --tokenizer TOKENIZER source.columns.question=q source.columns.answer=a
    """
    from raysvc.cli.dataset_info import source_of
    from raysvc.cli.first_job import job_text, look, script_text
    from raysvc.errors import ConfigError
    from raysvc.job.job_file import load_job
    from raysvc.job.job_schema import FILE, schema_text

    script = None if trainer is None else out.with_name(f"train_{trainer}.py")
    for path in (out, script):
        if path is not None and path.exists():
            raise ConfigError(str(path), "exists already", "name another file with --out")
    source = source_of(data)
    for setting in settings or ():
        if not setting.startswith(NAMES):
            raise ConfigError(
                setting,
                "is not about columns, roles, the tokenizer or train_on",
                f"set it in {out}, once it is written",
            )
    named = {"source": source.model_dump(exclude_unset=True), "tokenizer": {"name": tokenizer}}
    job = load_job(named, settings or ())
    source = job.source
    found = look(source, job.tokenizer, job.train_on)
    text = script_text(trainer, out, tokenizer, found) if trainer is not None else ""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_name(FILE).write_text(schema_text())
    out.write_text(job_text(source, job.tokenizer, found, job.train_on))
    if script is not None:
        script.write_text(text)
    if as_json:
        emit({"job": str(out), **({"script": str(script)} if script else {}), **asdict(found)})
        return
    print(*found.lines(), sep="\n", file=sys.stderr)
    if found.unusable:
        print(f"warning: {found.unusable}", file=sys.stderr)
        print(f"job: {out}")
    else:
        command = f"python {script}" if script else f"raysvc train {out}"
        print(f"job: {out} (next: raysvc show {out} --row 0, then {command})")
