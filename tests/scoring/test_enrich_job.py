"""A job's computed columns: which entry they make, when it is found again, and what is refused before a row is read."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raysvc
from raysvc.api import entry_or_build
from raysvc.cache import names
from raysvc.cache.entry import Entry
from raysvc.cache.find import collect_garbage, list_entries
from raysvc.cache.store.open import open_store
from raysvc.cli.sample_data import write_tokenizer
from raysvc.errors import ConfigError
from raysvc.job.job_file import load_job
from raysvc.pipelines import row_slices
from raysvc.progress import silent
from raysvc.scoring.job_columns import explain_columns, with_found_columns
from tests.cache.helpers import wait_until_unused


def pairs(num_rows: int) -> str:
    rows = (
        {"prompt": f"{n} + {n} = ", "chosen": "yes " * (n % 7 + 1), "rejected": "never " * (n % 3 + 1),
         "domain": "math" if n % 3 else "code"}
        for n in range(num_rows)
    )  # fmt: skip
    return "".join(json.dumps(row) + "\n" for row in rows)


def save_model(path: Path, vocab_size: int, seed: int = 0, **config: Any) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(seed)
    LlamaForCausalLM(
        LlamaConfig(vocab_size=vocab_size, num_key_value_heads=2, **{**sizes, **config})
    ).save_pretrained(path)
    return str(path)


@pytest.fixture
def job(tmp_path: Path, sample: dict[str, str]) -> dict[str, Any]:
    """Twelve pairs, and a model of their tokenizer."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(pairs(12))
    return {
        "source": {"path": str(rows), "carry": ["domain"]},
        "tokenizer": sample["tokenizer"],
        "cache": {"root": str(tmp_path / "cache")},
        "trainer": {"model": save_model(tmp_path / "model", 512)},
    }


def entry_of(job: dict[str, Any], **enrich: Any) -> raysvc.CacheEntry:
    return raysvc.enrich(job, enrich=enrich)


def folders(job: dict[str, Any]) -> dict[str, str]:
    return {one.folder: one.state for one in list_entries(open_store(job["cache"]["root"]))}


def test_a_second_job_finds_what_the_first_computed(job: dict[str, Any]) -> None:
    first = entry_of(job, ref_logprobs={})
    assert not first.hit
    assert "ref_logprobs: not computed for these rows yet" in first.reason
    again = entry_of(job, ref_logprobs={})
    assert (again.hit, again.uri) == (True, first.uri)
    assert set(first.row(0)) == {"input_ids", "loss_mask", "source_row", "chosen", "domain", "ref_logprobs"}
    assert raysvc.tokenize(job).row(5) == {k: v for k, v in first.row(5).items() if k != "ref_logprobs"}
    assert first[3].text == raysvc.tokenize(job)[3].text  # by the tokenizer that lies beside the rows
    (report,) = first.report["added"]
    masks = np.concatenate([raysvc.tokenize(job).row(row)["loss_mask"] for row in range(24)])
    assert report["targets"] == masks.sum()
    assert report["mean_logprob"] == pytest.approx(-np.log(512), rel=0.1)


@pytest.mark.parametrize("objective", ["dpo", "ipo"])
def test_an_objective_with_a_reference_takes_the_model_that_it_trains(
    job: dict[str, Any], objective: str
) -> None:
    named = entry_of(job, ref_logprobs={"model": job["trainer"]["model"]})
    implied = raysvc.enrich(job, trainer={"objective": objective})
    assert implied.uri == named.uri
    assert raysvc.enrich(job, trainer={"objective": "simpo"}).uri == raysvc.tokenize(job).uri


def test_what_changes_a_number_changes_the_key(job: dict[str, Any], tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", 512, seed=1)
    uris = [
        entry_of(job, teacher=teacher).uri
        for teacher in (
            {"model": job["trainer"]["model"], "top_k": 4},
            {"model": job["trainer"]["model"], "top_k": 5},
            {"model": other, "top_k": 4},
            {"model": other, "top_k": 4, "dtype": "bfloat16"},
            {"by": "domain", "models": {"math": other, "code": other}, "top_k": 4},
        )
    ]
    assert len(set(uris)) == len(uris)
    Path(job["source"]["path"]).write_text(pairs(13))
    more = entry_of(job, teacher={"model": other, "top_k": 4})
    assert more.uri not in uris
    assert more.num_rows == 26


def test_where_a_model_lies_changes_nothing_and_what_it_holds_does(
    job: dict[str, Any], tmp_path: Path
) -> None:
    first = entry_of(job, ref_logprobs={}).uri
    moved = shutil.copytree(job["trainer"]["model"], tmp_path / "moved")
    assert entry_of(job, ref_logprobs={"model": str(moved)}).uri == first
    weights = moved / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert entry_of(job, ref_logprobs={"model": str(moved)}).uri != first
    (moved / "README.md").write_text("of no meaning")


def test_a_reference_and_a_teacher_are_two_entries_on_one_another(job: dict[str, Any]) -> None:
    reference = entry_of(job, ref_logprobs={})
    both = entry_of(job, ref_logprobs={}, teacher={"model": job["trainer"]["model"], "top_k": 3})
    assert both.entries[0].folders == (
        both.entries[0].folder,
        reference.entries[0].folder,
        raysvc.tokenize(job).entries[0].folder,
    )
    assert np.array_equal(
        both.rows.read(np.arange(24)).tokens["ref_logprobs"],
        reference.rows.read(np.arange(24)).tokens["ref_logprobs"],
    )
    assert both.rows.read(np.arange(24)).wide["teacher_ids"].shape == (3,)


def test_slices_and_batches_change_no_number(job: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = entry_of(job, ref_logprobs={}).rows.read(np.arange(24)).tokens["ref_logprobs"]
    monkeypatch.setattr(row_slices, "LEAST_TOKENS", 40)
    cut = entry_of(
        {**job, "cache": {"root": job["cache"]["root"], "force": True}},
        ref_logprobs={},
        micro_batch_tokens=50,
    )
    assert len(cut.entries[0].manifest.parts) > 5
    assert np.abs(cut.rows.read(np.arange(24)).tokens["ref_logprobs"] - whole).max() < 2e-6


def test_a_row_has_the_teacher_that_its_column_names(job: dict[str, Any], tmp_path: Path) -> None:
    models = {
        "math": save_model(tmp_path / "m", 512, seed=3),
        "code": save_model(tmp_path / "c", 512, seed=4),
    }
    both = entry_of(job, teacher={"by": "domain", "models": models, "top_k": 2})
    alone = {name: entry_of(job, teacher={"model": path, "top_k": 2}) for name, path in models.items()}
    for row in range(24):
        values = both.row(row)
        expected = alone[values["domain"]].row(row)
        assert values["teacher_ids"] == expected["teacher_ids"]


def test_a_source_of_a_mixture_has_its_own_teacher(job: dict[str, Any], tmp_path: Path) -> None:
    models = {"a": save_model(tmp_path / "m", 512, seed=3), "b": save_model(tmp_path / "c", 512, seed=4)}
    other = tmp_path / "more.jsonl"
    other.write_text(pairs(5))
    sources = {
        "a": {"source": job["source"], "weight": 1},
        "b": {"source": {**job["source"], "path": str(other)}, "weight": 1},
    }
    mixed = {name: value for name, value in job.items() if name != "source"} | {
        "mixture": {"sources": sources}
    }
    entry = raysvc.enrich(mixed, enrich={"teacher": {"by": "source", "models": models, "top_k": 2}})
    one = raysvc.enrich(job, enrich={"teacher": {"model": models["a"], "top_k": 2}})
    assert entry.entries[0].uri == one.uri
    assert (entry.sources, entry.num_rows) == (("a", "b"), 34)
    assert len(entry.row("1:0:6")["teacher_ids"][0]) == 2
    with pytest.raises(ConfigError, match="has no model for the source 'b' \\(it has a\\)"):
        raysvc.enrich(mixed, enrich={"teacher": {"by": "source", "models": {"a": models["a"]}}})


@pytest.mark.parametrize("wrong", ["model", "model of rows to come", "positions", "value"])
@pytest.mark.parametrize("made", [raysvc.enrich, lambda job: entry_or_build(job, None, silent)])
def test_columns_of_a_later_source_are_refused_before_rows_of_an_earlier_one_are_tokenized(
    job: dict[str, Any], tmp_path: Path, made: Callable[..., Any], wrong: str
) -> None:
    other = tmp_path / "more.jsonl"
    other.write_text(pairs(5))
    sources = {
        "first": {"source": {**job["source"], "path": str(other)}, "weight": 1},
        "second": {"source": job["source"], "weight": 1},
    }
    there = wrong != "model of rows to come"
    if there:
        raysvc.tokenize(job)
    good, short = job["trainer"]["model"], save_model(tmp_path / "short", 512, max_position_embeddings=16)
    by, models, text = {
        "positions": ("source", {"first": good, "second": short}, "has 16 positions, the longest row"),
        "value": ("domain", {"math": good}, "domain = 'code'"),
    }.get(wrong, ("source", {"first": good, "second": "/none"}, "there is no folder /none"))
    before = folders(job) if there else {}
    mixed = {name: value for name, value in job.items() if name != "source"}
    teacher = {"by": by, "models": models, "top_k": 2}
    with pytest.raises(ConfigError, match=text):
        made(load_job(mixed, mixture={"sources": sources}, enrich={"teacher": teacher}))
    assert (folders(job) if there else list(tmp_path.rglob("*.arrow"))) == (before or [])


class TestRefused:
    """By name, and before anything is computed."""

    def check(self, job: dict[str, Any], message: str, **enrich: Any) -> None:
        before = set(folders(job)) if Path(job["cache"]["root"]).exists() else set()
        with pytest.raises(ConfigError, match=message):
            entry_of(job, **enrich)
        base = raysvc.tokenize(job).entries[0].folder
        assert set(folders(job)) - before <= {base}
        assert not any(names.SHARED.fullmatch(name) for name in open_store(job["cache"]["root"]).list(base))

    def test_a_model_that_is_not_there(self, job: dict[str, Any], tmp_path: Path) -> None:
        self.check(
            job,
            "enrich.ref_logprobs.model: there is no folder /nowhere/model",
            ref_logprobs={"model": "/nowhere/model"},
        )
        self.check(job, r"'no/such-model' cannot be loaded", ref_logprobs={"model": "no/such-model"})
        (tmp_path / "empty").mkdir()
        self.check(job, "cannot be loaded", ref_logprobs={"model": str(tmp_path / "empty")})

    def test_a_model_without_weights(self, job: dict[str, Any]) -> None:
        (Path(job["trainer"]["model"]) / "model.safetensors").unlink()
        self.check(job, "holds no weights", ref_logprobs={})

    def test_a_smaller_vocabulary(self, job: dict[str, Any], tmp_path: Path) -> None:
        self.check(
            job,
            "has 300 entries, the tokenizer of the rows 512",
            ref_logprobs={"model": save_model(tmp_path / "s", 300)},
        )

    def test_a_smaller_vocabulary_of_the_same_tokenizer_is_taken_where_rows_have_no_more(
        self, job: dict[str, Any], tmp_path: Path
    ) -> None:
        most = max(max(row["input_ids"]) for row in map(raysvc.tokenize(job).rows.row, range(4)))
        assert most < 511
        path = save_model(tmp_path / "s", 511)
        shutil.copytree(job["tokenizer"], path, dirs_exist_ok=True)
        assert "teacher_ids" in entry_of(job, teacher={"model": path, "top_k": 2}).row(0)

    def test_another_tokenizer(self, job: dict[str, Any], tmp_path: Path) -> None:
        path = save_model(tmp_path / "other", 512)
        write_tokenizer(Path(path), ["a b c d"] * 3 + ["xyz uvw " * 40] * 9, vocab_size=400)
        self.check(
            job,
            r"was trained with another tokenizer: \d+ of 512 tokens differ, first",
            ref_logprobs={"model": path},
        )

    def test_the_same_tokenizer_with_more_tokens_is_taken(self, job: dict[str, Any], tmp_path: Path) -> None:
        path = save_model(tmp_path / "more", 600)
        shutil.copytree(job["tokenizer"], path, dirs_exist_ok=True)
        raw = json.loads((Path(path) / "tokenizer.json").read_text())
        raw["added_tokens"].append({**raw["added_tokens"][-1], "id": 512, "content": "<|more|>"})
        (Path(path) / "tokenizer.json").write_text(json.dumps(raw))
        assert "teacher_ids" in entry_of(job, teacher={"model": path, "top_k": 2}).row(0)

    def test_rows_beyond_its_positions(self, job: dict[str, Any], tmp_path: Path) -> None:
        path = save_model(tmp_path / "short", 512, max_position_embeddings=16)
        self.check(
            job,
            r"has 16 positions, the longest row \d+ tokens; give max_length: 16",
            ref_logprobs={"model": path},
        )

    def test_more_entries_than_there_are(self, job: dict[str, Any]) -> None:
        self.check(
            job, "600 is above the 512 entries", teacher={"model": job["trainer"]["model"], "top_k": 600}
        )

    def test_a_value_that_names_no_model(self, job: dict[str, Any]) -> None:
        teacher = {"by": "domain", "models": {"math": job["trainer"]["model"]}, "top_k": 2}
        self.check(job, "no model for rows with domain = 'code'", teacher=teacher)

    def test_a_column_that_the_rows_do_not_carry(self, job: dict[str, Any]) -> None:
        teacher = {"by": "language", "models": {"en": "tiny"}}
        self.check(job, r"do not carry 'language'; carry it: source.carry: \[language\]", teacher=teacher)
        self.check(job, "source is for a mixture", teacher={"by": "source", "models": {"a": "tiny"}})

    def test_one_model_and_several(self, job: dict[str, Any]) -> None:
        for teacher in ({}, {"model": "tiny", "by": "domain", "models": {"a": "tiny"}}, {"by": "domain"}):
            with pytest.raises(ConfigError, match="give a model, or by and models"):
                load_job(job, enrich={"teacher": teacher})

    def test_numbers_that_are_not_finite_leave_no_entry(self, job: dict[str, Any], tmp_path: Path) -> None:
        from safetensors.torch import load_file, save_file

        path = Path(save_model(tmp_path / "nan", 512)) / "model.safetensors"
        weights = load_file(path)
        weights["model.norm.weight"][3] = float("nan")
        save_file(weights, path, metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=r"gives no finite log-probability for token \d+ of row \d+"):
            entry_of(job, ref_logprobs={"model": str(path.parent)})
        assert set(folders(job).values()) == {"finished", "building"}

    def test_a_column_that_the_source_brings(self, tmp_path: Path, sample: dict[str, str]) -> None:
        rows = tmp_path / "tokens.jsonl"
        rows.write_text(
            json.dumps({"input_ids": [5, 6], "loss_mask": [0, 1], "ref_logprobs": [0.0, -1.0]}) + "\n"
        )
        carry = {"ref_logprobs": {"dtype": "float32", "per": "token"}}
        job = {"source": {"path": str(rows), "carry": carry}, "tokenizer": sample["tokenizer"]}
        job |= {"cache": {"root": str(tmp_path / "cache")}}
        with pytest.raises(ConfigError, match="computes ref_logprobs, which source"):
            raysvc.enrich(job, enrich={"ref_logprobs": {"model": "tiny"}})
        assert raysvc.enrich(job, trainer={"objective": "dpo"}).uri == raysvc.tokenize(job).uri

    def test_weights_that_change_while_they_are_read(
        self, job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from raysvc.pipelines import enrich

        real = enrich.compute_slice

        def compute(*args: Any) -> Any:
            with open(Path(job["trainer"]["model"]) / "model.safetensors", "r+b") as file:
                file.seek(-1, 2)
                file.write(b"\x3c")
            return real(*args)

        monkeypatch.setattr(enrich, "compute_slice", compute)
        with pytest.raises(ConfigError, match="its model changed while the columns were computed"):
            entry_of(job, ref_logprobs={})
        assert "finished" not in {
            state
            for folder, state in folders(job).items()
            if folder != raysvc.tokenize(job).entries[0].folder
        }


def test_rows_of_empty_answers_and_cut_rows_get_columns(job: dict[str, Any]) -> None:
    rows = [
        {"prompt": f"{n} is: ", "chosen": "" if n % 2 else "yes " * 40, "rejected": "no"} for n in range(8)
    ]
    Path(job["source"]["path"]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    cut = {**job, "source": {"path": job["source"]["path"]}, "max_length": 20, "truncation": "keep_start"}
    entry = raysvc.enrich(cut, enrich={"ref_logprobs": {}}, max_quarantine=1.0)
    for row in range(entry.num_rows):
        values = entry.row(row)
        assert len(values["ref_logprobs"]) == len(values["input_ids"]) <= 20
        assert [value != 0 for value in values["ref_logprobs"]] == [bool(one) for one in values["loss_mask"]]


def test_two_that_ask_at_once_compute_once(job: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from raysvc.pipelines import enrich

    made: list[int] = []
    real = enrich.compute_slice
    monkeypatch.setattr(enrich, "compute_slice", lambda *args: (made.append(args[2].index), real(*args))[1])
    monkeypatch.setattr(row_slices, "LEAST_TOKENS", 100)
    raysvc.tokenize(job)
    entries: list[raysvc.CacheEntry] = []
    threads = [
        threading.Thread(target=lambda: entries.append(entry_of(job, ref_logprobs={}))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({one.uri for one in entries}) == 1
    assert sorted(made) == list(range(len(entries[0].entries[0].manifest.parts)))


def test_a_build_that_ended_half_way_goes_on(job: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from raysvc.pipelines import enrich

    monkeypatch.setattr(row_slices, "LEAST_TOKENS", 60)
    whole = entry_of({**job, "cache": {"root": job["cache"]["root"] + "-2"}}, ref_logprobs={})
    made: list[int] = []
    real = enrich.compute_slice

    def three(*args: Any) -> Any:
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(args[2].index)
        return real(*args)

    monkeypatch.setattr(enrich, "compute_slice", three)
    with pytest.raises(KeyboardInterrupt):
        entry_of(job, ref_logprobs={})
    monkeypatch.setattr(enrich, "compute_slice", lambda *args: (made.append(args[2].index), real(*args))[1])
    entry = entry_of(job, ref_logprobs={})
    assert sorted(made) == list(range(len(whole.entries[0].manifest.parts)))
    assert [one.checksum for one in entry.entries[0].manifest.parts] == [
        one.checksum for one in whole.entries[0].manifest.parts
    ]


def test_gc_between_computing_and_training_takes_neither(job: dict[str, Any]) -> None:
    """However old both are, the base outlives what shares it; what is gone is computed again."""
    entry = entry_of(job, ref_logprobs={})
    values = entry.rows.read(np.arange(24)).tokens["ref_logprobs"]
    store = open_store(job["cache"]["root"])
    collect_garbage(store, older_than_s=0, grace_s=0)
    reader = Entry.open(store, entry.entries[0].folder)
    assert np.array_equal(reader.read(np.arange(24)).tokens["ref_logprobs"], values)
    for one in (entry.entries[0], reader):
        one._held.result().release()
    wait_until_unused(job["cache"]["root"])  # marks of the build
    collect_garbage(store, older_than_s=0, grace_s=0)
    collect_garbage(store, older_than_s=0, grace_s=0)
    assert folders(job) == {}
    again = entry_of(job, ref_logprobs={})
    assert np.array_equal(again.rows.read(np.arange(24)).tokens["ref_logprobs"], values)


def test_explain_says_what_differs_and_looking_computes_nothing(job: dict[str, Any]) -> None:
    wants = {"teacher": {"model": job["trainer"]["model"], "top_k": 3}}
    config = load_job(job, enrich=wants)
    assert explain_columns(config, "", job["cache"]["root"])["added"] == []  # the rows are not there yet
    base = raysvc.tokenize(job)
    (told,) = explain_columns(config, "", job["cache"]["root"])["added"]
    assert (told["hit"], told["reason"]) == (False, "not computed for these rows yet")
    found, missing = with_found_columns(config, base)
    assert (found.uri, missing) == (base.uri, ["teacher_ids", "teacher_logprobs"])
    entry = entry_of(job, **wants)
    (told,) = explain_columns(config, "", job["cache"]["root"])["added"]
    assert (told["hit"], told["key"]) == (True, entry.key)
    assert with_found_columns(config, base)[0].uri == entry.uri
    other = load_job(job, enrich={"teacher": {**wants["teacher"], "top_k": 2}})
    (told,) = explain_columns(other, "", job["cache"]["root"])["added"]
    assert "columns.teacher_ids.shape[0]" in told["reason"]


def test_columns_of_computed_entries_travel_with_their_pads(job: dict[str, Any]) -> None:
    from raysvc.builds.job_plan import plan_config

    config = load_job(job, enrich={"teacher": {"model": job["trainer"]["model"], "top_k": 3}})
    plan = plan_config(config, raysvc.enrich(config))
    assert {"teacher_ids", "teacher_logprobs", "domain", "chosen"} <= set(plan.columns)
    assert plan.pad_values["teacher_ids"] == -1


def test_a_private_job_leaves_nothing_for_others(job: dict[str, Any]) -> None:
    private = {**job, "cache": {**job["cache"], "enabled": False}}
    uris = {entry_of(private, ref_logprobs={}).uri for _ in range(2)}
    assert len(uris) == 2
    assert not entry_of(job, ref_logprobs={}).hit


def test_an_entry_on_s3_gets_its_columns_there(
    job: dict[str, Any], tmp_path: Path, s3_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = entry_of(job, ref_logprobs={})
    monkeypatch.setenv("RAYSVC_PART_CACHE_DIR", str(tmp_path / "copies"))
    store = s3_server.store("enrich-")
    job["cache"] = {"root": store.url, "storage_options": s3_server.options}
    entry = entry_of(job, ref_logprobs={})
    assert entry.uri.startswith("s3://")
    assert entry.key == local.key
    every = np.arange(24)
    assert np.array_equal(
        entry.rows.read(every).tokens["ref_logprobs"], local.rows.read(every).tokens["ref_logprobs"]
    )
    assert entry_of(job, ref_logprobs={}).hit


def test_rows_with_media_are_refused_because_a_model_would_read_their_text_alone(tmp_path: Path) -> None:
    from raysvc.cli.demo_images import write_image_job

    job = load_job(write_image_job(tmp_path, 9), cache={"root": str(tmp_path / "cache")})
    with pytest.raises(ConfigError, match=r"enrich\.ref_logprobs: 8 of the 9 rows have media.*carry them"):
        raysvc.enrich(job, enrich={"ref_logprobs": {"model": "tiny"}})
