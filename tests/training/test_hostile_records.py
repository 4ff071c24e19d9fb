"""Other records that are read again: what a trainer said back, how steps were served, owners, a loop's checkpoint, an exported model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raysvc.actors.model.load_model import load_lm, read_config
from raysvc.actors.server.journal import Journal
from raysvc.actors.server.kept.served_records import ServedRecords
from raysvc.actors.server.spec import ServeSpec
from raysvc.builds.serve_log import read_served
from raysvc.cache.local.model_digests import FILE, write_digests
from raysvc.cache.store.claim import Claim, Owner
from raysvc.cache.store.posix import PosixStore
from raysvc.errors import UserMistake
from raysvc.feedback.decision import Decision
from raysvc.feedback.feedback_log import FeedbackLog, RowOutcomes
from raysvc.job.config import PlanConfig
from raysvc.rl.loop_checkpoint import LoopCheckpoint
from raysvc.trackers.tracker import tracked_run

from .test_damaged_checkpoints import harms

Case = tuple[Path, Callable[[], Any]]  # a file, and what reads it


class Client:
    next_step = 4

    def state_dict(self) -> dict[str, Any]:
        return {"frontier": self.next_step, "identity": {"seed": 7}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == self.state_dict()


def decision(folder: Path) -> Case:
    log = FeedbackLog(str(folder))
    log.add(0, Decision("weights", 4, None, (0.5, 0.25), (1, 2), {}))
    return folder / "decisions" / f"{0:012d}.json", lambda: FeedbackLog(str(folder)).decisions()


def outcomes(folder: Path) -> Case:
    steps = np.repeat(np.arange(3), 2)
    FeedbackLog(str(folder)).report(
        RowOutcomes(steps, np.arange(6), {"loss": np.ones(6, np.float32)}), known=0
    )
    (path,) = (folder / "outcomes").iterdir()
    return path, lambda: FeedbackLog(str(folder)).outcomes(0, 9, [])


def served(folder: Path) -> Case:
    spec = ServeSpec(name="s", sources=(), plan=PlanConfig(), pad_token_id=0, journal=f"{folder}/server")
    ServedRecords(f"{folder}/server", {}).keep(0, spec)
    (path,) = (folder / "server" / "served").iterdir()
    return path, lambda: ServedRecords(f"{folder}/server", {}).keep(4, spec)


def replayed(folder: Path) -> Case:
    path, _ = served(folder)
    return path, lambda: read_served(str(folder), 2)


def loop(folder: Path) -> Case:
    def checkpoint() -> LoopCheckpoint:
        return LoopCheckpoint(folder / "loop.pt", Client(), model=nn.Linear(6, 5))  # type: ignore[arg-type]

    checkpoint().save()
    return folder / "loop.pt", lambda: checkpoint().restore()


def model(folder: Path) -> Case:
    folder.mkdir()
    load_lm("tiny", 40).save_pretrained(  # type: ignore[operator]
        folder, dict(load_lm("tiny", 40).state_dict())
    )
    load_lm("tiny", 40).save_config(folder)  # type: ignore[operator]
    write_digests(folder)
    (path,) = folder.glob("*.safetensors")
    return path, lambda: load_lm(str(folder), 40)


def config(folder: Path) -> Case:
    model(folder)
    return folder / "config.json", lambda: read_config(str(folder))


def digests(folder: Path) -> Case:
    model(folder)
    return folder / FILE, lambda: load_lm(str(folder), 40)


def tracked(folder: Path) -> Case:
    known = tracked_run(folder)

    def read() -> None:
        assert tracked_run(folder).id == known.id

    return folder / "trackers.json", read


MAKERS = [decision, outcomes, served, replayed, loop, model, config, digests, tracked]


@pytest.mark.parametrize("make", MAKERS)
def test_every_damage_of_a_record_is_refused_by_name_and_nothing_runs(
    tmp_path: Path, make: Callable[[Path], Case]
) -> None:
    marker = tmp_path / "it-ran"
    path, read = make(tmp_path / "folder")
    good = path.read_bytes()
    read()
    for what, bad in harms(good, marker, min(len(good), 400)):
        if bad is None or (make is tracked and what == "longer"):
            continue
        path.write_bytes(bad)
        with pytest.raises(UserMistake) as raised:
            read()
        assert raised.value.where == str(path), (what, raised.value)
        assert "\n" not in str(raised.value)
        assert not marker.exists(), what
    path.write_bytes(good)
    read()


def decisions(folder: Path) -> Case:
    log = FeedbackLog(str(folder))
    for number in range(2):
        log.add(number, Decision("weights", 4, None, (number, 1), (), {}))
    return folder / "decisions", lambda: FeedbackLog(str(folder)).decisions()


def served_lines(folder: Path) -> Case:
    for step in range(2):
        spec = ServeSpec(
            name=f"s{step}", sources=(), plan=PlanConfig(), pad_token_id=0, journal=f"{folder}/server"
        )
        ServedRecords(f"{folder}/server", {}).keep(step, spec)
    return folder / "server" / "served", lambda: read_served(str(folder), 2)


def journal(folder: Path) -> Case:
    Journal(str(folder)).save(lambda: {"leases": {"": {"fence": 1}}})
    older = (folder / f"{1:012d}.json").read_bytes()
    Journal(str(folder)).save(lambda: {"leases": {"": {"fence": 5}}})
    (folder / f"{3:012d}.json").write_bytes(older)
    return folder, lambda: Journal(str(folder)).load()


@pytest.mark.parametrize("make", [decisions, served_lines])
def test_whole_records_that_changed_places_are_refused_by_name(
    tmp_path: Path, make: Callable[[Path], Case]
) -> None:
    folder, read = make(tmp_path / "folder")
    read()
    first, second = sorted(folder.iterdir())
    (tmp_path / "aside").write_bytes(second.read_bytes())
    first.replace(second)
    (tmp_path / "aside").replace(first)
    with pytest.raises(UserMistake) as raised:
        read()
    assert raised.value.where == str(first)


def test_an_older_record_of_a_journal_under_a_newer_name_does_not_count(tmp_path: Path) -> None:
    folder, read = journal(tmp_path / "folder")
    assert read() == {"leases": {"": {"fence": 5}}}
    (folder / f"{2:012d}.json").unlink()
    with pytest.raises(UserMistake, match=r"000000000003\.json: is another record, under this name"):
        read()


def test_a_changed_bit_in_the_record_of_an_owner_is_an_owner_that_nobody_knows(tmp_path: Path) -> None:
    """Else it could seem to have ended, and somebody would write into its folder."""
    store = PosixStore(str(tmp_path))
    claim = Claim(store, Owner("server", "s", namespace="n", incarnation="i"))
    number = claim.take()
    path = tmp_path / "owners" / f"{number:012d}.json"
    good = path.read_bytes()
    assert claim._read(number)[0] == claim.owner
    for what, bad in harms(good, tmp_path / "it-ran", len(good)):
        if bad is not None:
            path.write_bytes(bad)
            assert claim._read(number) == (None, ""), what
    path.write_bytes(json.dumps(json.loads(good) | {"sha256": 0}).encode())
    assert claim._read(number) == (None, "")
    claim.release()


def test_what_an_earlier_version_wrote_is_read(tmp_path: Path) -> None:
    path, _ = decision(tmp_path / "a")
    raw = json.loads(path.read_bytes())
    del raw["sha256"]
    path.write_text(json.dumps(raw))
    assert FeedbackLog(str(tmp_path / "a")).decisions()[0].from_step == 4
    path, read = outcomes(tmp_path / "b")
    path.rename(path.with_name(path.name.rpartition("-")[0] + ".arrow"))
    assert len(read().steps) == 6
    client: Any = Client()
    part = nn.Linear(6, 5)
    torch.save({"model": part.state_dict(), "data": client.state_dict()}, tmp_path / "loop.pt")
    assert LoopCheckpoint(tmp_path / "loop.pt", client, model=nn.Linear(6, 5)).restore() == 4
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "trackers.json").write_text('{"id": "abc"}\n')
    assert tracked_run(tmp_path / "d").id == "abc"
    _, read = model(tmp_path / "c")
    (tmp_path / "c" / FILE).unlink()
    read()
