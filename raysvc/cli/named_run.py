"""Finds what a command is about: the job of a job.yaml, the job that a run had, or a run that has none.

Always true:
- a word without `=` names a job.yaml or a run, by its path or by its name in `runs`; another one is refused, with the runs that are there;
- of a run, the job is read from its folder, whole; fields in which another one differs are named, and never mixed with it;
- a run that has no job, like one of rollouts, is taken where a command is for those too (`SERVED_RUNS`).
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from raysvc.errors import ConfigError

if TYPE_CHECKING:
    from raysvc.job.config import JobConfig

SERVED_RUNS = ("replay", "report", "show")  # commands that need no job of a run
SHOWN_RUNS = 8
FILES = ("job.json", "served.jsonl", os.path.join("server", "served"))  # a run has one of them


@dataclass(frozen=True)
class ServedRun:
    """The folder, or URL, of a run without a job, in place of a job."""

    folder: str


@dataclass(frozen=True)
class NamedJob:
    """The job that a command is about.

    Attributes:
        job: with the folder of its run.
        ran: it is the one that the run in that folder had.
    """

    job: JobConfig
    ran: bool


def served_run(config: object, overrides: Sequence[str] | None) -> str | None:
    """The folder of a run without a job, if a command was given one.

    Raises:
        ConfigError: keys of its job are to be changed.
    """
    if not isinstance(config, ServedRun):
        return None
    if overrides:
        raise ConfigError(overrides[0], f"changes a job, and {config.folder} has none", "leave it out")
    return config.folder


def job_that_ran(config: Any, overrides: Sequence[str] | None) -> NamedJob:
    """The job that the run in a job's run folder had; the job itself where nothing ran there. Fields that differ are said.

    Raises:
        ConfigError: the job cannot be read, or that of the run.
    """
    from raysvc.job.job_file import load_job
    from raysvc.training.run_job import has_job, job_of_run

    job = load_job(config, overrides or ())
    folder = _absolute(job)
    if not has_job(folder):
        return NamedJob(job, False)
    ran = job_of_run(folder, job)
    if told := _differences(job, ran):
        _note(f"the run in {folder} had another job, which is taken: {told}")
    return NamedJob(ran, True)


def job_as_it_is(config: Any, overrides: Sequence[str] | None) -> NamedJob:
    """A job for what is yet to run; where a run in its folder had another one, the fields that differ are said.

    Raises:
        ConfigError: the job cannot be read.
    """
    from raysvc.job.job_file import load_job
    from raysvc.training.run_job import has_job, job_of_run

    job = load_job(config, overrides or ())
    folder = _absolute(job)
    if not has_job(folder):
        return NamedJob(job, False)
    try:
        told = _differences(job, job_of_run(folder, job))
    except ConfigError as error:
        _note(f"it is not known which job the run in {folder} had: {error}")
        return NamedJob(job, False)
    if told:
        _note(f"the run in {folder} had another job, which is shown where its folder is named: {told}")
    from_its_folder = not isinstance(config, str) and not told
    return NamedJob(job, from_its_folder)


def show_command(named: NamedJob, config: Any, overrides: Sequence[str] | None) -> str:
    """Returns the command that shows what a command is about, from whatever folder it is typed."""
    from raysvc.training.run_job import job_of_run

    if named.ran:
        folder = _absolute(named.job)
        with suppress(ConfigError):  # it names code, which only a job file may
            job_of_run(folder)
            return shlex.join(["raysvc", "show", folder])
    words = [word for word in (config, *(overrides or ())) if isinstance(word, str)]
    return f"cd {shlex.quote(os.getcwd())} && {shlex.join(['raysvc', 'show', *words])}"


def with_job_named(arguments: dict[str, Any], default: str | None, of_served_runs: bool) -> dict[str, Any]:
    """`raysvc train job.yaml` means `raysvc train -c job.yaml`, and `raysvc report runs/a` has the job of that run.

    Raises:
        ConfigError: a word names nothing that is there, or there are two jobs.
    """
    words = arguments.get("overrides") or []
    for word in takewhile(lambda word: not _is_explained(word), words):
        if "=" not in word and not _is_yaml(word):
            run_folder(word)
    if not words or "=" in words[0] or _is_explained(words[0]):
        return arguments
    first, rest = words[0], words[1:]
    if _is_yaml(first):
        if arguments["config"] != default:
            what = f"there is another job, -c {arguments['config']}"
            raise ConfigError(first, what, "name one of them")
        return {**arguments, "config": first, "overrides": rest}
    from raysvc.training.run_job import has_job, job_of_run

    folder = run_folder(first)
    if of_served_runs and arguments["config"] == default and not has_job(folder) and _is_served(folder):
        return {**arguments, "config": ServedRun(folder), "overrides": rest}
    if not has_job(folder):
        what = "is a folder, and a job is a file; no run has kept its job there"
        raise ConfigError(first, what, "write -c job.yaml, the job whose trainer.run_dir it is")
    if arguments["config"] != default:
        what = f"is a run, and there is another job, -c {arguments['config']}"
        raise ConfigError(first, what, "name one of them")
    return {**arguments, "config": job_of_run(folder), "overrides": rest}


def further_runs(words: Sequence[str] | None) -> list[str]:
    """The folders of runs that stand after the first one, before dotted overrides.

    Raises:
        ConfigError: a word is neither.
    """
    return [run_folder(word) for word in words or () if "=" not in word and not _is_explained(word)]


def run_folder(word: str) -> str:
    """The folder of a run that an argument names, by its path or by its name in `runs`; a URL as it is.

    Raises:
        ConfigError: it is not there; the message lists runs that are.
    """
    if "://" in word:
        return word
    folders = [path for path in (word, os.path.join("runs", word)) if os.path.isdir(path)]
    if folders:
        return next((path for path in folders if _is_run(path)), folders[0])
    there = _runs_beside(word)
    named = ", ".join(f"{os.path.basename(folder)} ({folder})" for folder in there[:SHOWN_RUNS])
    more = f" and {len(there) - SHOWN_RUNS} more" if len(there) > SHOWN_RUNS else ""
    what = f"is no run that is there; runs are {named}{more}" if there else "is no run, and none is here"
    raise ConfigError(word, what, "name the folder of a run, or a job.yaml")


def _runs_beside(word: str) -> list[str]:
    """Folders of runs where the named one was looked for, the newest first."""
    places = dict.fromkeys(os.path.normpath(place) for place in (os.path.dirname(word) or "runs", "runs"))
    folders = [entry.path for place in places if os.path.isdir(place) for entry in os.scandir(place)]
    return sorted(filter(_is_run, folders), key=os.path.getmtime, reverse=True)


def _is_run(folder: str) -> bool:
    return any(os.path.exists(os.path.join(folder, file)) for file in FILES)


def _is_yaml(word: str) -> bool:
    return word.endswith((".yaml", ".yml"))


def _is_explained(word: str) -> bool:
    """Returns whether who reads overrides says what is wrong with a word without `=`: it is a file, or a key without its value."""
    from raysvc.job.config import JobConfig

    is_key = word.partition(".")[0] in JobConfig.model_fields and not os.path.isdir(word)
    return not _is_yaml(word) and (os.path.isfile(word) or is_key)


def _is_served(folder: str) -> bool:
    """Returns whether a run says how its steps were made; of a URL that is found out when it is read."""
    return "://" in folder or any(os.path.exists(os.path.join(folder, file)) for file in FILES[1:])


def _absolute(job: JobConfig) -> str:
    from raysvc.cache.store.open import absolute

    return absolute(job.run_dir)


def _differences(job: JobConfig, ran: JobConfig) -> str:
    """Fields in which a job differs from the one that ran, with both values; "" where none does."""
    from raysvc.training.run_job import differences

    return "; ".join(
        f"{key} was {theirs!r} and is {ours!r}" for key, (ours, theirs) in differences(job, ran).items()
    )


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)
