"""`raysvc.load`: the steps of a job without a server, beside those of an attached client."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import raysvc
from raysvc.actors.launch import stop_server
from raysvc.cli.sample_data import write_rows
from raysvc.errors import ConfigError, ServerError, StateMismatch, StepOutOfOrder

NO_RAY = """
import sys
import raysvc
with raysvc.load(sys.argv[1]) as loader:
    for micro in loader:
        if micro.ends_step:
            loader.commit(micro.step)
assert loader.next_step == loader.schedule.num_steps > 1
assert not [name for name in sys.modules if name.split(".")[0] == "ray"]
"""


def job_of(folder: Path, sample: dict[str, str], **sections: Any) -> dict[str, Any]:
    rows = folder / "rows.jsonl"
    if not rows.exists():
        write_rows(rows, 60)
    return {
        "source": {"path": str(rows), "format": "chat"},
        "tokenizer": sample["tokenizer"],
        "cache": {"root": str(folder / "cache")},
        "plan": {"batch_size": 8, "mini_batch_size": 4, "micro_batch_tokens": 256, "epochs": 2},
        "server": {"name": "beside"},
        "trainer": {"run_dir": str(folder / "run")},
        **sections,
    }


def digests(loader: Any, stop: int | None = None) -> list[tuple[int, list[str]]]:
    found = []
    for step in loader.steps(stop=stop):
        found.append((step.index, [shard.digest() for shard in step.shards]))
        loader.commit(step.index)
    return found


@pytest.mark.ray
@pytest.mark.parametrize("layout", ["padded_right", "packed"])
def test_steps_and_states_are_those_of_an_attached_client(
    tmp_path: Path, sample: dict[str, str], ray_session: None, layout: str
) -> None:
    job = job_of(tmp_path, sample)
    job["plan"]["layout"] = layout
    with raysvc.load(job, dp_size=2, rank=1) as loader:
        local = digests(loader, stop=9)
        state = loader.state_dict()
        local += digests(loader)
    raysvc.serve(job)
    try:
        with (
            raysvc.attach_rank("beside", dp_size=2, rank=0) as zero,
            raysvc.attach_rank("beside", dp_size=2, rank=1) as one,
        ):
            for client in (zero, one):
                client.load_state_dict(state)
            served = []
            for theirs, step in zip(zero.steps(stop=12), one.steps(stop=12), strict=True):
                served.append((step.index, [shard.digest() for shard in step.shards]))
                zero.commit(theirs.index)
                one.commit(step.index)
            of_the_server = one.state_dict()
    finally:
        stop_server("beside")
    assert [index for index, _ in local] == list(range(16))
    assert served == local[9:12]
    again = raysvc.load(job, dp_size=2, rank=1)
    again.load_state_dict(of_the_server)
    assert digests(again) == local[12:]
    assert again.state_dict()["plan"] == loader.state_dict()["plan"]


def test_ray_is_not_imported(tmp_path: Path, sample: dict[str, str]) -> None:
    import yaml

    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job_of(tmp_path, sample)))
    subprocess.run([sys.executable, "-c", NO_RAY, str(path)], check=True, timeout=120)


def test_all_ranks_together_have_every_row_of_an_epoch_once_on_any_number_of_them(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    job = job_of(tmp_path, sample)
    state, seen = None, []
    for size, stop in ((1, 3), (3, 6), (2, 8)):
        states = []
        for rank in range(size):
            with raysvc.load(job, dp_size=size, rank=rank) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                for step in loader.steps(stop=stop):
                    seen += [one for shard in step.shards for one in shard.row_ids.tolist() if one >= 0]
                    loader.commit(step.index)
                states.append(loader.state_dict())
        assert all(one == states[0] for one in states)
        state = states[0]
    assert len(seen) == len(set(seen)) == 60


def test_one_loader_gives_the_steps_of_any_rank_and_world_size(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    job = job_of(tmp_path, sample)
    loader = raysvc.load(job)
    next(loader.steps())
    for size in (1, 3):
        for rank in range(size):
            loader.rewind(0)
            with raysvc.load(job, dp_size=size, rank=rank) as own:
                for ours, theirs in zip(
                    loader.steps(rank=rank, world_size=size, stop=4), own.steps(stop=4), strict=True
                ):
                    ids, wanted = (
                        [shard.row_ids.tolist() for shard in step.shards] for step in (ours, theirs)
                    )
                    assert ids == wanted
    assert loader.state_dict()["dp_size"] == 3
    with pytest.raises(ConfigError, match=r"steps\(rank\): 3 is not below world_size = 3"):
        loader.steps(rank=3)
    with pytest.raises(
        ConfigError, match=r"load\(world_size\): is called dp_size; write load\(dp_size=2, rank"
    ):
        raysvc.load(job, world_size=2)


def test_a_dataset_goes_on_in_the_middle_of_a_step(tmp_path: Path, sample: dict[str, str]) -> None:
    job = job_of(tmp_path, sample)
    whole = [item["input_ids"].tolist() for item in raysvc.load(job).as_torch_dataset()]
    first = raysvc.load(job).as_torch_dataset()
    items = iter(first)
    before = [next(items)["input_ids"].tolist() for _ in range(5)]
    second = raysvc.load(job).as_torch_dataset()
    second.load_state_dict(first.state_dict())
    assert before + [item["input_ids"].tolist() for item in second] == whole
    assert len(second) == len(whole)


def test_look_ahead_is_not_in_the_state_and_changes_no_byte(tmp_path: Path, sample: dict[str, str]) -> None:
    job = job_of(tmp_path, sample)
    loaders = [raysvc.load({**job, "server": {"look_ahead_steps": ahead}}) for ahead in (0, 5)]
    steps = [loader.steps() for loader in loaders]
    for loader, its in zip(loaders, steps, strict=True):
        assert next(its).index == 0
        assert loader.state_dict()["frontier"] == 0
    made = [[shard.digest() for step in its for shard in step.shards] for its in steps]
    assert made[0] == made[1]


def test_what_comes_between_is_refused(tmp_path: Path, sample: dict[str, str]) -> None:
    loader = raysvc.load(job_of(tmp_path, sample))
    steps = loader.steps()
    next(steps)
    with pytest.raises(StepOutOfOrder, match="newest that was handed out"):
        loader.commit(3)
    loader.rewind(4)
    with pytest.raises(StepOutOfOrder, match="a new iteration from step 4"):
        next(steps)
    assert next(loader.steps()).index == 4
    with pytest.raises(StepOutOfOrder):
        loader.rewind(17)


def test_a_state_of_other_rows_is_refused_by_field(tmp_path: Path, sample: dict[str, str]) -> None:
    job = job_of(tmp_path, sample)
    state = raysvc.load(job).state_dict()
    other = raysvc.load({**job, "plan": {**job["plan"], "seed": 3}})
    with pytest.raises(StateMismatch, match="seed"):
        other.load_state_dict(state)


def test_an_eval_has_every_row_once_and_moves_no_training_step(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    held = tmp_path / "held.jsonl"
    write_rows(held, 10)
    evals = {"held": {"source": {"path": str(held), "format": "chat"}}}
    loader = raysvc.load(job_of(tmp_path, sample, evals=evals))
    rows = [
        one for step in loader.eval("held").steps() for shard in step.shards for one in shard.row_ids.tolist()
    ]
    assert len({one for one in rows if one >= 0}) == 10
    assert loader.next_step == 0
    with pytest.raises(ServerError, match="it has: held"):
        loader.eval("other")


def test_what_needs_a_server_is_refused_by_name(tmp_path: Path, sample: dict[str, str]) -> None:
    job = job_of(tmp_path, sample)
    followed = {"plan": {"batch_size": 8, "shuffle": "window"}, "source": {**job["source"], "follow": True}}
    with pytest.raises(ConfigError, match=r"source\.follow: needs somebody who looks"):
        raysvc.load({**job, **followed})


def test_columns_that_nobody_has_computed_are_named(tmp_path: Path, sample: dict[str, str]) -> None:
    rows = tmp_path / "pairs.jsonl"
    pair = {"prompt": "q", "chosen": "yes", "rejected": "no"}
    rows.write_text("".join(json.dumps({**pair, "prompt": f"q {n}"}) + "\n" for n in range(20)))
    job = job_of(tmp_path, sample, source={"path": str(rows)}, plan={"batch_size": 4})
    job["trainer"]["objective"] = "dpo"
    with pytest.raises(
        ConfigError, match=r"the job wants ref_logprobs, which a model computes.*run raysvc enrich"
    ):
        raysvc.load(job)


def test_a_large_source_asks_for_ray_by_name(
    tmp_path: Path, sample: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raysvc.pipelines.local_build.CLUSTER_S", 0.0)
    job = job_of(tmp_path, sample)
    job["workers"] = {"slice_mb": (tmp_path / "rows.jsonl").stat().st_size / 6e6}
    with pytest.raises(ConfigError, match=r'run raysvc tokenize first.*load\(address="local"\)'):
        raysvc.load(job)
    with pytest.raises(ConfigError, match=r"2 is not below dp_size = 2"):
        raysvc.load(job_of(tmp_path, sample), dp_size=2, rank=2)
