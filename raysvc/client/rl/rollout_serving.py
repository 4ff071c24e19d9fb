"""Starting a rollout server: every argument is checked before anything starts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import ValidationError

from raysvc.client.arguments import (
    choice,
    flag,
    integer,
    mapping,
    matching,
    number,
    optional_integer,
    optional_text,
    text,
    texts,
)
from raysvc.errors import ConfigError
from raysvc.job.config import NAME, PlanConfig

if TYPE_CHECKING:
    from pathlib import Path

    from raysvc.actors.server.spec import PromptSpec
    from raysvc.api import ServerHandle
    from raysvc.job.config import JobConfig

_ARGUMENT = "serve_rollouts({})"


def serve_rollouts(
    name: str,
    *,
    run_dir: str,
    pad_token_id: int,
    plan: Mapping[str, Any],
    max_staleness: int | None = 1,
    wait_s: float = 600.0,
    late: Sequence[str] = (),
    defaults: Mapping[str, float] | None = None,
    on_bad_group: Literal["fill", "shrink"] = "fill",
    producer_ttl_s: float = 60.0,
    rows: Literal["keep", "merge"] = "merge",
    model_reads: Sequence[str] | None = None,
    prompts: str | Path | Mapping[str, Any] | JobConfig | None = None,
    on_stale: Literal["pace", "reissue", "drop", "withhold", "train"] | None = None,
    max_prompt_s: float | None = None,
    max_attempts: int = 3,
    drop_constant: str | None = None,
    lease_ttl_s: float = 30.0,
    num_cpus: float = 0.5,
    storage_options: Mapping[str, Any] | None = None,
    address: str | None = None,
    detached: bool = True,
    placement: Literal["any", "data", "trainer"] = "any",
    wait_for_nodes: bool = False,
) -> ServerHandle:
    """Start a server whose steps are made of groups that producers put.

    Args:
        name: to attach by.
        run_dir: folder or fsspec URL under which groups, memberships and the frontier are stored.
        pad_token_id: of the tokenizer.
        plan: section `plan` of a job; `batch_size` and `mini_batch_size` count groups, `columns` names what travels.
        max_staleness: weight versions that a row may be old when it is trained; None: any.
        wait_s: how long a fetch waits for enough groups.
        late: columns that may arrive after their rows, by `Rollouts.add_columns`; a group is trained when it has them.
        defaults: column -> value to use if a put lacks the column; a column without a default is required.
        on_bad_group: what happens if a group cannot be collated: `fill` replaces it by the next one,
            `shrink` continues without it. It is quarantined in either case, and the trainer gets its step.
        placement: its node: where Ray finds room; that of the caller where `run_dir` is a folder; that of the caller.
        wait_for_nodes: nodes come on demand: one that can hold the server is waited for.
        producer_ttl_s: how long the reservations and open groups of a producer last without a sign of life.
        prompts: a job (path, mapping or config) whose rows the server hands out as prompts, in the order and as often as its `plan`
            says, mixed by its `mixture`; `producer.prompts()` gets them. None: producers bring prompts of their own.
        on_stale: what is done about groups that get too old. `pace`, the default with prompts: steps wait for prompts that are under way,
            oldest weights first, so that none gets too old and long rollouts are trained as often as short ones; `reissue`, with
            prompts: the prompt is handed out again; `drop`, the default without prompts: it is not trained; `withhold`: a group is as
            old as its newest sequence, and of one that is trained the sequences that are too old travel without a target, as part of
            the baseline (`Group(weight_version=[...])`); a group that is too old as a whole is reissued, or dropped without prompts;
            `train`: it is trained, and the loss should correct for it (`PolicyLoss(tis_cap=...)`).
        max_prompt_s: with prompts, how long a producer may have one before it is handed out again; None: as long as it lives.
        max_attempts: with prompts, how often one is handed out before it is given up.
        drop_constant: a per-row column (the reward): a group whose trajectories all have one value of it teaches nothing, and is dropped
            when it is complete; with prompts, the next one is handed out for it (DAPO's dynamic sampling).
        rows: `merge`: a row of a group that another row of it begins with travels inside that one, with its own targets, advantages
            and weight: the loss and its gradient stay the same for a causal model. `keep`: rows travel as they were put.
        model_reads: for `merge`, per-token columns that the model reads, such as routed experts: rows that differ there stay apart.
            None: all that have several numbers a token.

    Raises:
        ConfigError: an impossible plan, or a server that no node can hold.
        NodeError: a node where it may start does not see `run_dir`.
        ServerError: the name is served with another spec.
    """
    from raysvc.actors.launch import start_server, wait_for
    from raysvc.actors.server.spec import OnStale, RolloutSpec, ServeSpec
    from raysvc.api import ServerHandle
    from raysvc.cache.store.open import absolute
    from raysvc.cluster import connect, node_for
    from raysvc.nodes.job_nodes import rollouts_see
    from raysvc.plan.schedule import Schedule
    from raysvc.team import ray_namespace

    choice(_ARGUMENT.format("on_bad_group"), on_bad_group, ("fill", "shrink"))
    choice(_ARGUMENT.format("rows"), rows, ("keep", "merge"))
    if on_stale is not None:
        choice(_ARGUMENT.format("on_stale"), on_stale, get_args(OnStale))
    limit_s = (
        None if max_prompt_s is None else number(_ARGUMENT.format("max_prompt_s"), max_prompt_s, or_low=False)
    )
    attempts = integer(_ARGUMENT.format("max_attempts"), max_attempts, 1)
    job = None if prompts is None else _job_of_prompts(prompts)
    needs_prompts = on_stale in ("pace", "reissue")
    if job is None and (needs_prompts, max_prompt_s, max_attempts) != (False, None, 3):
        given = next(
            name
            for name, is_given in (
                (f"on_stale={on_stale!r}", needs_prompts),
                ("max_prompt_s", limit_s),
                ("max_attempts", True),
            )
            if is_given
        )
        raise ConfigError(_ARGUMENT.format(given), "is about prompts, and there are none", "give prompts too")
    filled = mapping(_ARGUMENT.format("defaults"), defaults or {})
    spec = ServeSpec(
        name=matching(_ARGUMENT.format("name"), name, NAME),
        sources=(),
        plan=_plan(plan),
        pad_token_id=integer(_ARGUMENT.format("pad_token_id"), pad_token_id, 0),
        journal=f"{absolute(text(_ARGUMENT.format('run_dir'), run_dir))}/server",
        storage_options=mapping(_ARGUMENT.format("storage_options"), storage_options or {}),
        rollouts=RolloutSpec(
            max_staleness=optional_integer(_ARGUMENT.format("max_staleness"), max_staleness, 0),
            wait_s=number(_ARGUMENT.format("wait_s"), wait_s),
            late=tuple(texts(_ARGUMENT.format("late"), late)),
            defaults={
                key: number(_ARGUMENT.format(f"defaults.{key}"), value, -math.inf)
                for key, value in filled.items()
            },
            on_bad_group=on_bad_group,
            producer_ttl_s=number(_ARGUMENT.format("producer_ttl_s"), producer_ttl_s, or_low=False),
            rows=rows,
            on_stale=on_stale or ("drop" if job is None else "pace"),
            drop_constant=optional_text(_ARGUMENT.format("drop_constant"), drop_constant),
            model_reads=None
            if model_reads is None
            else tuple(texts(_ARGUMENT.format("model_reads"), model_reads)),
        ),
        lease_ttl_s=number(_ARGUMENT.format("lease_ttl_s"), lease_ttl_s, or_low=False),
        num_cpus=number(_ARGUMENT.format("num_cpus"), num_cpus),
    )
    choice(_ARGUMENT.format("placement"), placement, ("any", "data", "trainer"))
    flag(_ARGUMENT.format("detached"), detached)
    flag(_ARGUMENT.format("wait_for_nodes"), wait_for_nodes)
    connect(optional_text(_ARGUMENT.format("address"), address))
    node_id = node_for(placement, run_dir)
    if node_id is None:
        rollouts_see(absolute(run_dir), spec.storage_options, spec.num_cpus, job)
    if job is not None and spec.rollouts is not None:
        handed_out = _prompts(job, address, limit_s, attempts)
        spec = spec.model_copy(update={"rollouts": spec.rollouts.model_copy(update={"prompts": handed_out})})
    actor = start_server(spec, detached=detached, node_id=node_id, may_grow=wait_for_nodes)
    facts = wait_for(actor.describe.remote(), f"server {name!r} to start")
    return ServerHandle(
        name, ray_namespace(), facts["num_rows"], Schedule.from_json(facts["schedule"]), actor
    )


def _job_of_prompts(prompts: str | Path | Mapping[str, Any] | JobConfig) -> JobConfig:
    """The job, if its rows can be handed out one by one.

    Raises:
        ConfigError: a key of it asks for something else.
    """
    from raysvc.builds.mixed_job import jobs_of
    from raysvc.job.job_file import load_job

    job = load_job(prompts)
    if job.plan.order is not None:
        raise ConfigError("plan.order", "orders steps, and prompts are handed out one by one", "leave it out")
    for name, one in jobs_of(job).items():
        if one.source.follow:
            where = "source.follow" if job.mixture is None else f"mixture.sources.{name}.source.follow"
            raise ConfigError(where, "has no end, and prompts are handed out by epochs", "leave it out")
    return job


def _prompts(
    job: JobConfig, address: str | None, max_prompt_s: float | None, max_attempts: int
) -> PromptSpec:
    """The entries of a job of prompts, which are built where they are missing, and the order of their rows."""
    from raysvc.actors.server.spec import PromptSpec, SourceSpec
    from raysvc.api import tokenize
    from raysvc.builds.mixed_job import mixture_spec
    from raysvc.evals.held_rows import trained_rows

    entry = tokenize(job, address=address)
    one_by_one = {"batch_size": 1, "mini_batch_size": None, "update_epochs": 1, "tail": "drop", "layout": "padded_right",
                  "micro_batch_size": 1, "micro_batch_tokens": None, "window": None, "cp_split": None, "columns": ("input_ids",)}  # fmt: skip
    return PromptSpec(
        sources=tuple(SourceSpec(uri=one.uri) for one in entry.entries),
        mixture=mixture_spec(job, entry.entries),
        plan=job.plan.model_copy(update={**one_by_one, "rows": trained_rows(job, entry.entries)}),
        storage_options=job.cache.storage_options,
        max_prompt_s=max_prompt_s,
        max_attempts=max_attempts,
    )


def _plan(plan: Mapping[str, Any]) -> PlanConfig:
    try:
        checked = PlanConfig.model_validate(mapping(_ARGUMENT.format("plan"), plan))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["plan", *(str(part) for part in first["loc"])])
        raise ConfigError(where, first["msg"].removeprefix("Value error, "), "change this value") from None
    if checked.order is not None:
        what = "groups of rollouts come in the order in which they are complete"
        raise ConfigError("plan.order", what, "leave it out")
    return checked
