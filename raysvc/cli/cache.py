"""`raysvc cache ls | info | explain | verify | gc | export`: look after cache entries."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysvc.cli.common import AsJson, edge, emit
from raysvc.cli.view import print_rows, print_table
from raysvc.progress import how_many

if TYPE_CHECKING:
    from raysvc.cache.entry import Entry
    from raysvc.cache.store.store import Store
    from raysvc.job.config import JobConfig

app = typer.Typer(help="List, check, explain, export and delete cache entries.", no_args_is_help=True)

Root = Annotated[str | None, typer.Option(help="Cache root. Default: RAYSVC_CACHE_DIR, else .raysvc/cache.")]
Key = Annotated[str, typer.Argument(help="Key of an entry, or its first characters.")]
Config = Annotated[
    str | None,
    typer.Option(
        "-c", "--config", help="Use the cache root and storage options of this job.", metavar="JOB.YAML"
    ),
]
Storage = Annotated[
    list[str] | None,
    typer.Option("--storage-option", help="KEY=VALUE for fsspec, such as endpoint_url=... Repeatable."),
]
Days = Annotated[float | None, typer.Option(help="Delete entries unused for this many days.", min=0)]
MaxGB = Annotated[
    float | None, typer.Option(help="Delete least recently used entries until the rest fits.", min=0)
]
GraceHours = Annotated[float, typer.Option(help="Never delete what is newer than this many hours.", min=0)]


@app.command()
@edge
def ls(
    root: Root = None, config: Config = None, storage_option: Storage = None, as_json: AsJson = False
) -> None:
    """List all entries, complete or not.

    Example: raysvc cache ls --root s3://bucket/cache
    """
    from raysvc.cache.find import list_entries

    store = _store(root, config, storage_option)
    entries = list_entries(store)
    if as_json:
        emit({"entries": [asdict(entry) for entry in entries]})
        return
    adds_to = {name: entry.folder for entry in entries for name in entry.shared_by}
    rows = [
        {
            "entry": _short_folder(entry.folder),
            "state": entry.state,
            **({"adds to": _short_folder(adds_to.get(entry.folder, ""))} if adds_to else {}),
            "MB": round(entry.num_bytes / 1e6, 1),
            "files": entry.num_files,
            "changed": datetime.datetime.fromtimestamp(entry.modified_s).isoformat(" ", "minutes"),
        }
        for entry in entries
    ]
    print_rows(f"Entries in {store.url}", rows)


@app.command()
@edge
def info(
    key: Key,
    root: Root = None,
    config: Config = None,
    storage_option: Storage = None,
    as_json: AsJson = False,
) -> None:
    """Show what an entry holds and which inputs made its key.

    Example: raysvc cache info 3f2a
    """
    entry = _entry(_store(root, config, storage_option), key)
    facts = {"uri": entry.uri, "key": entry.key, "rows": entry.num_rows, "tokens": entry.num_tokens}
    if as_json:
        emit(
            {
                **facts,
                "adds_to": entry.manifest.base or None,
                "columns": entry.columns,
                "recipe": entry.recipe,
                "report": dict(entry.report),
            }
        )
        return
    adds_to = {"adds to": entry.manifest.base} if entry.manifest.base else {}
    columns = " ".join(f"{name}: {kind}" for name, kind in entry.columns.items())
    print_table("Entry", {**facts, **adds_to, "parts": len(entry.manifest.parts), "columns": columns})
    print_table("Recipe", {name: _short(value) for name, value in flat(entry.recipe).items()})


@app.command()
@edge
def explain(
    keys: Annotated[
        list[str] | None, typer.Argument(help="Keys of two entries; or overrides of the job of -c, or none.")
    ] = None,
    config: Config = None,
    root: Root = None,
    storage_option: Storage = None,
    as_json: AsJson = False,
) -> None:
    """Explain a hit or a miss, or how two entries differ.

    Example: raysvc cache explain job.yaml
    """
    from raysvc.cache import key as keys_module
    from raysvc.errors import ConfigError

    if config is not None and not any("=" not in key for key in keys or ()):
        _explain_job(_job(config, keys or [], root, storage_option), as_json)
        return
    if keys is None or len(keys) != 2:
        raise ConfigError("raysvc cache explain", "needs two entries, or -c job.yaml", "give one of these")
    store = _store(root, config, storage_option)
    first, second = (_entry(store, key) for key in keys)
    differences = keys_module.explain(first.recipe, second.recipe)
    if as_json:
        emit({"differences": [asdict(difference) for difference in differences]})
        return
    for difference in differences:
        print(difference)
    print(f"{how_many(len(differences), 'field')} {'differs' if len(differences) == 1 else 'differ'}")


@app.command()
@edge
def verify(
    key: Key,
    root: Root = None,
    config: Config = None,
    storage_option: Storage = None,
    mark: Annotated[bool, typer.Option(help="Mark a damaged entry, so that no job uses it.")] = True,
    as_json: AsJson = False,
) -> None:
    """Check every byte of an entry.

    Exit code 1 when something is wrong.

    Example: raysvc cache verify 3f2a
    """
    from raysvc.cache.verify import mark_damaged, repair, verify_folder
    from raysvc.media.media_index import media_problems

    store = _store(root, config, storage_option)
    folder = _folder(store, key)
    problems = verify_folder(store, folder, media_problems)
    if mark:
        repair(store, folder, problems)
        if not all(problem.can_be_repaired for problem in problems):
            mark_damaged(store, folder, problems)
    if as_json:
        emit({"entry": folder, "problems": [asdict(problem) for problem in problems]})
    for problem in problems:
        repaired = mark and problem.can_be_repaired
        print(f"{'repaired' if repaired else 'damaged'}: {problem}", file=sys.stderr)
    if not all(mark and problem.can_be_repaired for problem in problems):
        raise typer.Exit(1)
    if not as_json and not problems:
        print(f"{folder}: every byte is as it was written")


@app.command()
@edge
def gc(
    root: Root = None,
    config: Config = None,
    storage_option: Storage = None,
    days: Days = None,
    max_gb: MaxGB = None,
    grace_hours: GraceHours = 24.0,
    dry_run: Annotated[bool, typer.Option(help="Print what would be deleted, and delete nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete leftovers of dead builds, and old entries on request.

    Entries in use are never deleted.

    Example: raysvc cache gc --days 30 --dry-run
    """
    from raysvc.cache.gc import collect_garbage
    from raysvc.media.media_gc import remove_media

    removals = collect_garbage(
        _store(root, config, storage_option),
        older_than_s=None if days is None else days * 86400,
        max_bytes=None if max_gb is None else int(max_gb * 1e9),
        grace_s=grace_hours * 3600,
        dry_run=dry_run,
        beside=remove_media,
    )
    if as_json:
        emit({"dry_run": dry_run, "removals": [asdict(removal) for removal in removals]})
        return
    rows = [
        {"entry": r.folder[:20], "what": r.action, "why": r.reason, "MB": round(r.num_bytes / 1e6, 1)}
        for r in removals
    ]
    print_rows("Would remove" if dry_run else "Removed", rows)


@app.command()
@edge
def export(
    key: Key,
    to: Annotated[Path, typer.Option(help="Folder for the files; must be new or empty.")],
    root: Root = None,
    config: Config = None,
    storage_option: Storage = None,
    as_json: AsJson = False,
) -> None:
    """Export an entry as Parquet files.

    DuckDB, polars and others read them without raysvc.

    Example: raysvc cache export 3f2a --to rows/
    """
    from raysvc.cache.export.parquet_export import export_parquet

    paths = export_parquet(_entry(_store(root, config, storage_option), key), to)
    if as_json:
        emit({"files": [str(path) for path in paths]})
    else:
        print(f"{how_many(len(paths), 'file')} in {to}")


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """A nested mapping as dotted names."""
    if isinstance(value, Mapping) and value:
        return {
            name: leaf for key, item in value.items() for name, leaf in flat(item, f"{prefix}{key}.").items()
        }
    return {prefix.rstrip("."): value}


def _short_folder(folder: str) -> str:
    return folder[:16] + folder[64:]


def _explain_job(job: JobConfig, as_json: bool) -> None:
    from raysvc.builds.mixed_job import jobs_of
    from raysvc.scoring.job_columns import explain_columns

    jobs = jobs_of(job)
    found = {name: explain_columns(one, name, str(job.cache.root)) for name, one in jobs.items()}
    if as_json:
        emit(found if job.mixture else found[""])
        return
    for name, one in found.items():
        label = f"{name}: " if name else ""
        print(f"{label}{'hit' if one['hit'] else 'miss'}: key={one['key']} ({one['reason']})")
        for line in one["differences"]:
            print(f"  {line}")
        for added in one["added"]:
            names = ", ".join(added["columns"])
            print(
                f"{label}{names}: {'hit' if added['hit'] else 'miss'}: key={added['key']} ({added['reason']})"
            )
            for line in added["differences"]:
                print(f"  {line}")


def _store(root: str | None, config: str | None = None, options: list[str] | None = None) -> Store:
    from raysvc.cache.store.open import default_root, open_store

    if config is None:
        return open_store(default_root(root), _given(options))
    cache = _job(config, [], root, options).cache
    return open_store(str(cache.root), cache.storage_options, cache.unsafe_store)


def _job(config: str, overrides: list[str], root: str | None, options: list[str] | None) -> JobConfig:
    """A job file's job, with the root that is given, if any, and the storage options added."""
    from raysvc.cache.store.open import default_root
    from raysvc.job.job_file import load_job

    job = load_job(config, overrides)
    where = default_root(job.cache.root if root is None else root)
    cache = {"root": where, "storage_options": {**job.cache.storage_options, **_given(options)}}
    return job.model_copy(update={"cache": job.cache.model_copy(update=cache)})


def _given(options: list[str] | None) -> dict[str, str]:
    from raysvc.errors import ConfigError

    pairs = [option.partition("=") for option in options or ()]
    if not all(name and equals for name, equals, _ in pairs):
        remedy = "give e.g. endpoint_url=http://host"
        raise ConfigError("--storage-option", "an option is not KEY=VALUE", remedy)
    return {name: value for name, _, value in pairs}


def _folder(store: Store, key: str) -> str:
    from raysvc.cache.find import entry_folders
    from raysvc.errors import EntryError

    folders = entry_folders(store)
    names = [key] if key in folders else [folder for folder in folders if folder.startswith(key)]
    if len(names) != 1:
        what = f"{len(names)} entries start with it" if names else "no entry starts with it"
        raise EntryError(repr(key), what, "run raysvc cache ls, and give more digits")
    return names[0]


def _entry(store: Store, key: str) -> Entry:
    from raysvc.cache.entry import Entry

    return Entry.open(store, _folder(store, key))


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 70 else f"{text[:60]}... ({len(text)} characters)"
