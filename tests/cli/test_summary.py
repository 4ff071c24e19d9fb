"""What a person reads at the end of a run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from raysvc.cli.train import _show, show_summary
from raysvc.cli.view import View
from raysvc.progress import Tick

SUMMARY: dict[str, Any] = {
    "steps": 25,
    "optimizer_steps": 50,
    "rows": 1400,
    "tokens_trained": 10367,
    "loss_first": 6.481,
    "loss_last": 4.644,
    "loss_best": 4.612,
    "loss_best_step": 23,
    "tokens_per_s": 2600.0,
    "stall_fraction": 0.084,
    "stalls": {"by_cause": {"collation on the server": 0.22, "copy to the worker": 0.0008}, "last": []},
    "evals": {"held": {"loss": 5.01, "rows": 12}},
    "cache": {"hit": True, "key": "72f482f5b9432ab549ff", "reason": "same source"},
    "left_out": {"dropped": {"no assistant message": 3}, "quarantined": {"a": 1, "b": 1},
                 "truncated": 4, "example": "row 7: a; do this"},
    "resumed_from": None,
    "model": "/runs/a/model",
}  # fmt: skip


def lines(capsys: pytest.CaptureFixture[str], **changed: Any) -> dict[str, str]:
    show_summary("runs/a", {**SUMMARY, **changed}, False)
    title, *rest = capsys.readouterr().out.splitlines()
    assert title == "Run runs/a"
    return dict(line.split(": ", 1) for line in rest)


def test_the_end_of_a_run_says_what_was_trained_what_was_not_and_what_comes_next(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert lines(capsys) == {
        "trained": "1,400 rows with 10,367 trained tokens in 25 steps",
        "left out": "3 rows dropped (no assistant message), 2 quarantined (row 7: a; do this), 4 truncated",
        "loss": "6.481 first, 4.644 last, 4.612 best (step 23)",
        "eval held": "loss 5.01 on 12 rows",
        "speed": "2,600 trained tokens/s, 8.4% of the time waiting for data",
        "waited for": "collation on the server 0.22 s",
        "entry": "72f482f5b9432ab5, tokens were in the cache",
        "model": "/runs/a/model",
        "next": "raysvc report runs/a",
    }


def test_the_end_of_a_run_of_pairs_counts_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    held = {"loss": 0.6931, "rewards/accuracies": 0.5, "kl": 1.0, "rows": 12, "pairs": 6}
    told = lines(capsys, pairs=700, evals={"held": held})
    assert told["trained"].startswith("700 pairs with 10,367 trained tokens")
    assert told["eval held"] == "loss 0.6931, rewards/accuracies 0.5 on 6 pairs"


def test_a_run_whose_evals_decided_says_what_and_since_when(capsys: pytest.CaptureFixture[str]) -> None:
    best = {"eval": "held", "metric": "loss", "value": 4.9, "steps": 20}
    told = lines(capsys, best=best, stopped_early={**best, "without": 2, "patience": 2})
    assert told["stopped"] == "early: 2 evals without progress since eval held: loss 4.9 after 20 steps"
    assert told["best"] == "eval held: loss 4.9 after 20 steps"
    assert told["model"] == "/runs/a/model (the best: of 20 steps)"
    nothing = {**best, "value": None, "steps": 0, "without": 2, "patience": 2}
    assert "since eval held: no number" in lines(capsys, best=None, stopped_early=nothing)["stopped"]


def test_a_run_that_goes_on_an_unfinished_one_and_a_growing_entry_say_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = lines(capsys, resumed_from=20, model=None, left_out={}, evals={})
    assert told["trained"].endswith("in 25 steps, of which 5 now: resumed from the checkpoint of 20")
    assert told["left out"] == "not known yet: the build goes on"
    assert "model" not in told
    nothing = {"dropped": {}, "quarantined": {}, "truncated": 0, "example": None}
    assert lines(capsys, left_out=nothing)["left out"] == "no row of the source"
    some = {**nothing, "untrained": {"held out for the eval held": 4, "not reached": 1200}}
    assert (
        lines(capsys, left_out=some)["left out"]
        == "4 rows held out for the eval held, 1,200 rows not reached"
    )
    pairs = {**nothing, "untrained": {"held out for the eval held": 1}, "unit": "pairs"}
    assert lines(capsys, left_out=pairs)["left out"] == "1 pair held out for the eval held"
    many = lines(capsys, left_out={**nothing, "untrained": None})["left out"]
    assert many == "rows in no step are not counted of so many"


def test_a_machine_gets_the_summary_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    show_summary("runs/a", SUMMARY, True)
    assert json.loads(capsys.readouterr().out) == SUMMARY


@pytest.mark.parametrize(
    "damage", [{"tokens_per_t": 1.0}, {"stalls": {}}, {"evals": {"held": {}}}, {"rows": "x"}]
)
def test_a_damaged_summary_is_named(damage: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    found = {**SUMMARY, **damage}
    if "tokens_per_t" in damage:
        del found["tokens_per_s"]
    show_summary("runs/a", found, False)
    assert capsys.readouterr().out.splitlines()[1].startswith("summary: runs/a/summary.json is damaged")


def test_how_to_look_at_a_run_is_said_when_it_begins(capsys: pytest.CaptureFixture[str]) -> None:
    ticks = [
        Tick("start", 0, None, "", waiting="starting Ray"),
        Tick("start", 0, None, "", {"cluster": "a:1"}, final=True),
        Tick("train", 1, 2, "steps"),
    ]
    with View() as view:
        for tick in ticks:
            _show(view, "runs/a", "a:1", tick)
    assert capsys.readouterr().err.splitlines() == [
        "[start] (starting Ray)",
        "[start] cluster=a:1 done",
        "watch it: raysvc top --address a:1; as a page: raysvc top --web --address a:1",
        "look at it, also while it runs: raysvc report runs/a; raysvc show runs/a --step 0",
        "[train] 1/2 steps",
    ]
