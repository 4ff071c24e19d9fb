"""Every example runs, and does what its page says."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore"),  # of other libraries
    pytest.mark.timeout(600),  # a busy machine takes ten times as long to start processes
]
Example = Callable[..., dict[str, Any]]


@pytest.mark.slow
def test_trl_trains_pairs_of_a_server_and_goes_on_in_the_middle_of_a_step(
    example: Example, tmp_path: Path
) -> None:
    pytest.importorskip("trl")
    facts = example("trl_pairs", str(tmp_path))
    for name in ("dpo", "reward"):
        assert len(facts[name]["whole"]) == 8
        assert facts[name]["resumed"] == facts[name]["whole"]
        assert min(facts[name]["whole"]) < facts[name]["whole"][0], "it moves"
    assert facts["left"] == 0, "all steps are committed"


@pytest.mark.slow
def test_a_policy_of_trl_learns_and_goes_on_in_the_middle_of_a_generation_batch(
    example: Example, tmp_path: Path
) -> None:
    pytest.importorskip("trl")
    facts = example("trl_grpo", str(tmp_path))
    assert (len(facts["whole"]["loss"]), len(facts["whole"]["reward"])) == (32, 16), (
        "two optimizer steps each"
    )
    assert facts["resumed"] == facts["whole"]
    assert facts["whole"]["reward"][-1] > facts["whole"]["reward"][0] + 0.15, "it learns"
    assert facts["left"] == 0, "all steps are committed"


@pytest.mark.slow
def test_ray_train_with_a_killed_worker_ends_like_ranks_that_nobody_killed(
    example: Example, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboardX", reason="ray[train] is not installed")
    killed = example("ray_train", str(tmp_path / "killed"))
    calm = example("torchrun_ranks", str(tmp_path / "calm"))
    assert [len(rank["rows"]) for rank in calm] == [48, 80]
    assert killed["rows"] == [rank["rows"] for rank in calm]
    assert killed["resumed"] == [4], "it died in step 5, and went on from the checkpoint of step 3"
    assert killed["weights"] == calm[0]["weights"] == calm[1]["weights"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "library"),
    [
        ("fsdp2", "torch"),
        ("torchtitan", "torchtitan.distributed.context_parallel"),
        ("megatron", "megatron.core"),
        ("megatron_whole", "megatron.core"),
        ("megatron_tp", "megatron.core"),
    ],
)
def test_ranks_with_peers_have_the_losses_and_weights_of_one_process(
    host: str, library: str, example: Example, tmp_path: Path
) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    facts = example("mesh_ranks", host, str(tmp_path))
    alone = facts["alone"]
    assert (len(alone["losses"]), len(facts["ranks"])) == (8, 4)
    assert alone["losses"][-1] < alone["losses"][0] - 0.1, "it learns"
    for rank in facts["ranks"]:
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-9)
        assert rank["weights"] == pytest.approx(alone["weights"], rel=1e-9)


@pytest.mark.slow
def test_a_shard_of_ray_train_goes_on_after_a_kill_and_with_more_workers(
    example: Example, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboardX", reason="ray[train] is not installed")
    from raysvc.cache.find import open_finished
    from raysvc.job.config import PlanConfig
    from raysvc.plan.entry_plan import plan_of_entries

    facts = example("ray_train_data", str(tmp_path))
    plan = plan_of_entries(PlanConfig(batch_size=1, epochs=2), [open_finished(facts["uri"])])
    order = [int(plan.step(step, 1).mini_batches[0].row_ids[0]) for step in range(256)]
    first, second = facts["runs"]
    assert (first["starts"], second["starts"]) == (1, 2), (
        "the failure policy started it again, then a new run"
    )
    assert first["batches"] == [10] * 8
    assert second["batches"] == [10] * 8 + [12] * 12, "four end the first epoch"
    assert facts["rows"] == order[: 8 * 10 + 12 * 12]


@pytest.mark.slow
def test_a_controller_hands_on_refs_by_mini_batch_and_rank(example: Example) -> None:
    facts = example("skyrl_controller")
    assert facts["shape"] == [[2, 2], [2, 2]]
    flat = [row for mini in facts["rows"] for row in mini]
    assert flat == sorted(set(flat)), "every row of every step once, prompts in order"


def test_producer_and_learner_of_a_grpo_loop_are_45_lines() -> None:
    """Of code: what the page of the example promises."""
    text = (Path(__file__).parents[2] / "examples" / "grpo_toy.py").read_text()
    loops = {each.name: each for each in ast.parse(text).body if isinstance(each, ast.FunctionDef)}
    lines = [loops[name].end_lineno - loops[name].lineno + 1 for name in ("produce", "learn")]  # type: ignore[operator]
    assert sum(lines) + 1 <= 45, "with the decorator"


@pytest.mark.slow
def test_a_policy_learns_from_groups_that_are_at_most_one_version_old(
    example: Example, tmp_path: Path
) -> None:
    tensorboard = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    facts = example("grpo_toy", str(tmp_path / "run"), "15", "tensorboard")
    assert facts["last"] > facts["first"] + 0.2
    assert (facts["oldest"], facts["steps"]) == (1, 15)
    told = tensorboard.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    told.Reload()
    rewards = [event.value for event in told.Scalars("train/reward_mean")]
    assert (len(rewards), rewards[-1]) == (15, pytest.approx(facts["last"]))


@pytest.mark.slow
def test_the_same_command_goes_on_with_rollouts_where_it_ended(example: Example, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    first = example("grpo_toy", str(tmp_path / "run"), "6")
    checkpoint = (tmp_path / "run" / "checkpoint.pt").read_bytes()
    for _ in range(2):  # the second time the server is ahead of the checkpoint, as after a crash
        (tmp_path / "run" / "checkpoint.pt").write_bytes(checkpoint)
        again = example("grpo_toy", str(tmp_path / "run"), "15")
        assert (first["steps"], again["steps"], again["oldest"]) == (6, 9, 1)
        assert again["last"] > first["first"] + 0.2
