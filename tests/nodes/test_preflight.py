"""Places that a node does not see, tried from the other side: a task on this machine with another view of it."""

from __future__ import annotations

import fcntl
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from raysvc.errors import NodeError
from raysvc.nodes.place import MARK, SharedFile, SharedFolder, SharedModel
from raysvc.nodes.preflight import REMEDY, nodes_see, refusal, workers_see
from raysvc.nodes.room import living_nodes


def test_a_shared_folder_is_written_and_read_both_ways_and_left_as_it_was(tmp_path: Path) -> None:
    place = SharedFolder.open("cache.root", str(tmp_path), {})
    assert place.try_here("n") == "writes a file there that this machine does not see"
    assert (place.try_there("n"), place.try_here("n")) == ("", "")
    (tmp_path / f"{MARK}{place.number}").write_text("another disk with a file of that name")
    assert place.try_there("n") == "reads something else than this machine wrote there"
    place.close()
    assert list(tmp_path.iterdir()) == []
    assert place.try_there("n") == "does not see a file that this machine wrote there"
    assert list(tmp_path.iterdir()) == [], "nothing is written where the other side is not seen"


def test_a_folder_that_is_not_there_yet_is_tried_above(tmp_path: Path) -> None:
    place = SharedFolder.open("trainer.run_dir", f"{tmp_path}/runs/one", {})
    assert (place.try_there("n"), place.try_here("n")) == ("", "")
    place.close()
    assert list(tmp_path.iterdir()) == []


def test_a_bucket_is_tried_like_a_folder(s3_server: Any) -> None:
    url = f"s3://raysvc-tests/preflight-{os.getpid()}"
    place = SharedFolder.open("cache.root", url, s3_server.options)
    assert (place.try_there("n"), place.try_here("n")) == ("", "")
    place.close()
    assert place.try_there("n") == "does not see a file that this machine wrote there"
    lost = replace(place, options={**s3_server.options, "endpoint_url": "http://127.0.0.1:9"})
    assert "cannot use it" in lost.try_there("n")


def test_a_file_and_a_folder_of_a_model_are_the_same_there(tmp_path: Path, sample: dict[str, str]) -> None:
    rows = SharedFile.open("source.path", sample["rows"], {})
    assert rows.try_there("n") == ""
    other = replace(rows, size=7)
    assert other.try_there("n") == f"has another file there, of {rows.size} bytes instead of 7"
    assert replace(rows, url=f"{tmp_path}/none").try_there("n") == "does not see it"
    model = SharedModel.open("tokenizer", sample["tokenizer"])
    assert model.try_there("n") == ""
    assert "does not see more.bin in" in replace(model, files={**model.files, "more.bin": 1}).try_there("n")
    assert "has another" in replace(model, files=dict.fromkeys(model.files, 3)).try_there("n")
    of_the_nodes_alone = SharedModel.open("trainer.model", f"{tmp_path}/model")
    assert of_the_nodes_alone.try_there("n") == "does not see it"


def test_a_name_on_the_hub_that_only_this_machine_has_is_found(tmp_path: Path) -> None:
    there = SharedModel("tokenizer", "some/model", {"tokenizer_config.json": 0})
    assert there.try_there("n") == "does not see it"


def test_one_error_names_all_nodes_and_places() -> None:
    places = [SharedFile("cache.root", "/cache"), SharedFile("source.path", "/rows.jsonl")]
    faults = [(places[0], "n1 (aa)", "x"), (places[0], "n2 (bb)", "x"), (places[1], "n2 (bb)", "y")]
    assert str(refusal(faults)) == (
        f"cache.root /cache: nodes n1 (aa), n2 (bb): x. source.path /rows.jsonl: node n2 (bb): y; {REMEDY}"
    )


def test_a_node_that_has_another_view_is_refused_and_this_one_is_not_asked(
    tmp_path: Path, ray_session: None
) -> None:
    opened = os.open(tmp_path, os.O_RDONLY)
    private = fcntl.fcntl(opened, fcntl.F_DUPFD, 900)  # a number that no other process uses
    os.close(opened)
    try:
        here_alone = f"/proc/self/fd/{private}"  # a folder of this process
        opening = partial(SharedFolder.open, "cache.root", here_alone)
        workers_see([opening], {"CPU": 1.0})  # the only node is this process's own
        with pytest.raises(NodeError, match=r"cache.root /proc/self/fd/\d+: node .* does not see a file"):
            nodes_see([opening], living_nodes())
    finally:
        os.close(private)
    assert list(tmp_path.iterdir()) == []
    nodes_see([partial(SharedFolder.open, "cache.root", str(tmp_path))], living_nodes())


def test_work_goes_on_without_a_node_that_is_lost_while_it_is_asked(
    tmp_path: Path, ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = living_nodes()[0]
    opening = partial(SharedFolder.open, "cache.root", str(tmp_path))
    nodes_see([opening], [{**here, "NodeID": "ab" * 28}, here])  # lost before it was asked

    def lost(ref: Any) -> Any:
        raise ray.exceptions.NodeDiedError("Task failed because the node it was running on is dead")

    monkeypatch.setattr(ray, "get", lost)
    nodes_see([opening], [here])
