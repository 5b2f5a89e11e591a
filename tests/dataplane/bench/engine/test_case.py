"""A case's hash, and which results may be compared."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from dataplane.bench.engine.case import EngineCase, case_hash, checkpoint_hash, differences, require_same_case
from dataplane.bench.engine.compare import compare_with, ours_in
from dataplane.bench.errors import CaseError
from dataplane.bench.report import Report, document_of

CASE = EngineCase(
    model="m",
    checkpoint="c0ffee",
    hardware={"cpu": "x", "cores": 2},
    threads=2,
    dtype={"tidegate": "float32"},
    lengths={"w1": {"requests": 1, "prompt": 128, "output": 128}},
    arrival={"w1": "all at once"},
    flags={"tidegate": {"flags": "--forward=eager", "version": "1"}},
    pairs=10,
    quick=False,
    seed=0,
)


def test_the_hash_is_of_canonical_json_and_does_not_change_from_run_to_run() -> None:
    canonical = json.dumps(CASE.document(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert CASE.sha256 == hashlib.sha256(canonical.encode()).hexdigest()
    assert case_hash(dict(reversed(CASE.document().items()))) == CASE.sha256
    assert CASE.sha256 == "4c2431b3a44939d0eb1178bfb2c6d453bdd220428df405acd81b689ac3c54670"


def test_whatever_shapes_a_run_is_in_the_hash() -> None:
    changed = [
        replace(CASE, model="n"),
        replace(CASE, checkpoint="decaf"),
        replace(CASE, hardware={"cpu": "x", "cores": 4}),
        replace(CASE, threads=4),
        replace(CASE, dtype={"tidegate": "int8"}),
        replace(CASE, lengths={"w1": {"requests": 1, "prompt": 128, "output": 64}}),
        replace(CASE, arrival={"w1": "Poisson"}),
        replace(CASE, flags={"tidegate": {"flags": "--forward=captured", "version": "1"}}),
        replace(CASE, seed=1),
    ]
    assert len({CASE.sha256, *(case.sha256 for case in changed)}) == len(changed) + 1


def test_one_knob_may_be_turned_and_no_other() -> None:
    old = CASE.document()
    turned = replace(CASE, flags={"tidegate": {"flags": "--forward=captured", "version": "1"}}).document()
    assert differences(old, turned) == ["flags.tidegate.flags"]
    require_same_case(old, turned, "flags.tidegate")
    require_same_case(old, old, "")
    with pytest.raises(CaseError, match=r"differ in their cases: flags\.tidegate\.flags"):
        require_same_case(old, turned, "")
    with pytest.raises(CaseError, match=r"more than flags\.tidegate: seed"):
        require_same_case(old, {**turned, "seed": 1}, "flags.tidegate")
    with pytest.raises(CaseError, match="flags"):
        require_same_case(old, turned, "flags.tide")


def test_what_only_one_of_them_has_is_a_difference() -> None:
    assert differences({"a": {"b": None}}, {"a": {}}) == ["a.b"]


def result(case: EngineCase, speed: float) -> Report:
    figures = {"decode_tokens_per_s": {"figure": "decode_tokens_per_s", "unit": "tok/s", "ours": speed}}
    return Report("engine", case.document(), 0, results={"ours": {"w1": {"figures": figures}, "version": "1"}})


def test_an_earlier_result_is_compared_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "then.json"
    path.write_text(json.dumps(document_of(result(CASE, 20.0))))
    turned = replace(CASE, dtype={"tidegate": "int8"})
    table = compare_with(path, result(turned, 50.0), "dtype")
    assert table.rows == (("single stream", "decode_tokens_per_s", "20", "50", "2.500×"),)
    with pytest.raises(CaseError, match="pairs"):
        compare_with(path, result(replace(turned, pairs=3), 50.0), "dtype")
    path.write_text(json.dumps({**document_of(result(CASE, 20.0)), "bench": "gateway"}))
    with pytest.raises(CaseError, match="gateway"):
        compare_with(path, result(CASE, 50.0), "")
    path.write_text("[]")
    with pytest.raises(CaseError, match="no result"):
        compare_with(path, result(CASE, 50.0), "")


def test_our_figures_are_found_beside_a_peer_and_past_one_that_is_missing() -> None:
    figures = {"decode_tokens_per_s": {"ours": 3.0, "peer": 2.0}}
    against = {"vllm": {"missing": "no"}, "llama.cpp": {"w1": {"figures": figures}, "setup": {}}}
    assert ours_in({"against": against}) == {("w1", "decode_tokens_per_s"): 3.0}


def test_a_checkpoint_is_known_by_the_bytes_of_its_weights(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"one")
    first = checkpoint_hash(file)
    assert first == hashlib.sha256(hashlib.sha256(b"one").digest()).hexdigest()
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"one")
    assert checkpoint_hash(folder) == first
    (folder / "config.json").write_text("{}")
    assert checkpoint_hash(folder) == first
    (folder / "model.safetensors").write_bytes(b"two")
    assert checkpoint_hash(folder) != first
