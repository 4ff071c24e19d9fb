"""`raysvc show` and `raysvc report` of a run of rollouts: what its folder says, by hand-made groups."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from raysvc.actors.rollouts.rollout_stream import RolloutStream
from raysvc.actors.server.kept.served_records import ServedRecords
from raysvc.actors.server.make_step import Recipe
from raysvc.actors.server.spec import PromptSpec, RolloutSpec, ServeSpec, SourceSpec
from raysvc.cli.main import app
from raysvc.job.config import PlanConfig
from raysvc.rl.group import Group
from raysvc.rl.group_table import table_of
from raysvc.row_batch import RowBatch

SHARED = Path(os.environ.get("RAYSVC_SHARED", Path(__file__).parents[3] / "shared"))
PLAN = PlanConfig(batch_size=2, columns=("input_ids", "labels", "reward"))
GROUPS = (
    # " air", "line" were sampled, and came back as " airline": the second turn does not begin with the first
    Group("torn", [[9707, 11, 3720, 1056, 13], [9707, 11, 32475, 13, 7, 7]], [[0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 1]],
          rows={"reward": [0.5, 1.0]}, trajectory=[0, 0]),
    # the first row begins the second one, which holds it; the third trains the token that the first does
    Group("kept", [[5, 6, 7], [5, 6, 7, 8, 9], [5, 6, 7]], [[0, 0, 1], [0, 0, 0, 0, 1], [0, 0, 1]],
          rows={"reward": [2.0] * 3}, trajectory=[0, 0, 0]),
    Group("c", [[1, 2]], [[0, 1]], rows={"reward": [4.0]}, trajectory=[0]),
    Group("d", [[1, 2, 3, 4]], [[0, 1, 1, 1]], rows={"reward": [-1.0]}, trajectory=[0], weight_version=1),
)  # fmt: skip


def kept_run(folder: Path, rollouts: RolloutSpec) -> RolloutStream:
    """The groups of a run whose folder says how its steps are made."""
    journal = f"{folder}/server"
    spec = ServeSpec(
        name=folder.name,
        sources=(),
        plan=PLAN,
        pad_token_id=0,
        journal=journal,
        storage_options={},
        rollouts=rollouts,
    )
    ServedRecords(journal, {}).keep(0, spec)
    return RolloutStream(folder.name, rollouts, Recipe(PLAN, 0), f"{journal}/rollouts", {})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "grpo"
    stream = kept_run(folder, RolloutSpec(max_staleness=2))
    stream.put(table_of(GROUPS[:2]))
    assert stream.form(0, 0)
    stream.store.set_version(1, 1)
    stream.put(table_of(GROUPS[2:]))
    assert stream.form(1, 1)
    bad = Group("bad", [[1]], [[0]], rows={"reward": [0.0]}, trajectory=[0], weight_version=1)
    stream.put(table_of([bad]))
    stream.store.quarantine({("bad", 0): "ValueError: <no room>"})
    return folder


def told(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == code, result.output
    return str(result.output)


def test_a_step_shows_its_groups_rewards_versions_and_turns(run: Path) -> None:
    first = json.loads(told("show", str(run), "--step", "0", "--json").splitlines()[-1])
    torn, kept = first["groups"]
    assert (torn["group"], kept["group"]) == ("torn#0", "kept#0")
    assert torn["columns"]["reward"] == [0.5, 1.0]
    assert torn["columns"]["length"] == [5, 6]
    assert kept["travels_in_row"] in ([1, 1, 2], [0, 1, 1])
    assert first["turns"] == {"merged": 1, "apart": 1, "broken": 1}
    assert first["apart"] == {"trains the same tokens": 1}
    assert first["metrics"]["reward_mean"] == 1.5, "1.0 and 2.0: the last turns of two trajectories"
    second = json.loads(told("show", str(run), "--step", "1", "--json").splitlines()[-1])
    assert (second["trained_by"], second["turns"]["merged"]) == (1, 0)
    assert [group["columns"]["staleness"] for group in second["groups"]] == [[1], [0]]
    text = told("show", str(run), "--step", "0")
    lines = [line.split("\t") for line in text.splitlines()]
    head = lines[0]
    assert dict(zip(head, lines[2], strict=True)) == {
        "group": "kept#0", "rows": "3", "rows that travel": "2", "weights": "0", "tokens": "11", "longest": "5",
        "trained": "3", "reward": "2",
    }  # fmt: skip
    assert "turns: 1 merged, 1 apart, 1 broken; 1 trains the same tokens" in text
    assert (
        "group torn#0: row 1 continues row 0 up to token 2, where ids [3720] became ids [32475]: "
        "sampled ids [3720, 1056, 13], then found ids [32475, 13, 7, 7]"
    ) in text


def test_a_broken_turn_has_its_text_where_there_is_a_tokenizer(run: Path, tmp_path: Path) -> None:
    tokenizer = SHARED / "tokenizers" / "qwen2_5"
    if not tokenizer.exists():
        pytest.skip("no tokenizer of Qwen2.5")
    text = told("show", str(run), "--step", "0", "--tokenizer", str(tokenizer))
    assert "where ' air' became ' airline': sampled ' airline.', then found ' airline.(('" in text
    page = tmp_path / "text.html"
    told("report", str(run), "--out", str(page), "--tokenizer", str(tokenizer))
    assert "&#x27; air&#x27;</td><td>&#x27; airline&#x27;</td>" in page.read_text()


def test_the_report_is_one_page_with_the_curves_of_the_run_and_what_was_lost(
    run: Path, tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    before = {each: each.read_bytes() for each in run.rglob("*") if each.is_file()}
    told("report", str(run), "--out", str(page))
    assert {each: each.read_bytes() for each in run.rglob("*") if each.is_file()} == before, "it is only read"
    text = page.read_text()
    found = re.search(r'id="charts">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    charts = {chart["title"]: chart for chart in json.loads(found[1])}
    assert list(charts) == [
        "reward",
        "length",
        "trained_tokens",
        "staleness",
        "Rewards within a group",
        "Turns",
    ]
    of = lambda title: {each["name"]: each["values"] for each in charts[title]["series"]}  # noqa: E731
    assert charts["reward"]["x"] == [0, 1]
    assert of("reward") == {"mean": [1.5, 1.5], "min": [1, -1], "max": [2, 4]}
    assert of("length") == {"mean": [4.4, 3], "min": [3, 2], "max": [6, 4]}
    assert of("staleness") == {"mean": [0, 0.5], "min": [0, 0], "max": [0, 1]}
    # a group has one trajectory, and one reward
    assert of("Rewards within a group") == {"reward_std": [0, 0], "frac_reward_zero_std": [1, 1]}
    assert of("Turns") == {"merged": [1, 0], "apart": [1, 0], "broken": [1, 0]}
    assert "<td>bad#0</td><td>ValueError: &lt;no room&gt;</td>" in text
    assert "<td>quarantined</td><td class='n'>1</td>" in text
    assert "<td>torn#0</td>" in text


def test_a_group_whose_rows_are_gone_is_named_and_the_others_are_shown(run: Path) -> None:
    sorted((run / "server" / "rollouts" / "groups").iterdir())[1].unlink()
    text = told("show", str(run), "--step", "0")
    assert "kept#0\t3" in text
    gone = told("show", str(run), "--step", "1")
    assert "group c#0 is not trained: its rows are gone" in gone


def test_a_damaged_file_is_said_in_a_line(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = sorted((run / "server" / "rollouts" / "groups").iterdir())[1]
    whole = file.read_bytes()
    damaged = bytearray(whole)
    for at in range(len(whole) // 3, len(whole) // 3 + 6):
        damaged[at] ^= 0xFF
    file.write_bytes(damaged)
    result = CliRunner().invoke(app, ["show", str(run), "--step", "0"])
    assert result.exit_code == 2
    assert "is damaged: its bytes do not have the digest in its name" in result.stderr
    file.write_bytes(whole)
    of_group = RolloutStream.batch_of_group

    def damaged_c(stream: RolloutStream, key: tuple[str, int]) -> RowBatch:
        if key[0] == "c":
            raise pa.ArrowInvalid("bad")
        return of_group(stream, key)

    monkeypatch.setattr(RolloutStream, "batch_of_group", damaged_c)
    text = told("show", str(run), "--step", "1")
    assert "group c#0 is not trained: its rows are gone (bad)" in text
    assert "d#0\t1" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("show", "{}"), "--step: is missing"),
        (("show", "{}", "--step", "7"), "7 is not one of the 2 steps"),
        (("show", "{}", "--step", "0", "--rows"), "are for runs of a job"),
        (("show", "{}", "plan.batch_size=3", "--step", "0"), "changes a job"),
        (("plan", "{}"), "no run has kept its job there"),
        (("report", "{}/server"), "no run has kept its job there"),
    ],
)
def test_what_a_run_of_rollouts_cannot_be_asked_is_said(
    run: Path, words: tuple[str, ...], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    result = CliRunner().invoke(app, [word.format(run) for word in words])
    assert result.exit_code == 2
    assert said in result.stderr


def test_steps_that_were_forgotten_are_not_in_the_report(run: Path, tmp_path: Path) -> None:
    stream = RolloutStream(
        "grpo", RolloutSpec(max_staleness=2), Recipe(PLAN, 0), f"{run}/server/rollouts", {}
    )
    stream.delete_before(1)
    told("report", str(run), "--out", str(tmp_path / "report.html"))
    assert '"x": [1]' in (tmp_path / "report.html").read_text()


def test_prompts_that_were_lost_are_in_the_report_with_their_reasons(tmp_path: Path) -> None:
    prompts = PromptSpec(sources=(SourceSpec(uri="/an/entry/that/is/gone"),), plan=PlanConfig(batch_size=1))
    folder = tmp_path / "handed"
    stream = kept_run(folder, RolloutSpec(max_staleness=2, prompts=prompts))
    stream.store.desk.lose(["3/0:0:3", "5/0:0:5"], "dropped")
    stream.store.desk.lose(["4/0:0:4"], "took <longer> than max_prompt_s")
    stream.store.set_version(1, 0)  # waits until all is on disk
    (Path(folder) / "server" / "rollouts" / "groups").mkdir(exist_ok=True)
    told("report", str(folder), "--out", str(tmp_path / "report.html"))
    text = (tmp_path / "report.html").read_text()
    assert "<td>dropped</td><td class='n'>2</td>" in text
    assert "<td>took &lt;longer&gt; than max_prompt_s</td><td class='n'>1</td>" in text
    assert "<td>5/0:0:5</td><td>dropped</td>" in text
