"""What other engines are given is what ours computes with, and every engine reads the same prompts."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Backend
from transformers import AutoModelForCausalLM, AutoTokenizer

from dataplane.bench.engine.export import hugging_face_folder
from dataplane.bench.engine.prompts import Prompts
from dataplane.bench.errors import NotToBeHadError
from dataplane.config import find_model
from dataplane.llm import LLM
from dataplane.models.shape import ModelShape
from dataplane.models.sources import open_source
from dataplane.protocol import SamplingParams
from dataplane.tokenizer import load_tokenizer
from tests.factories.models import tiny_config, write_gguf, write_safetensors


@pytest.fixture(scope="module")
def packaged() -> Path:
    return find_model("smollm2")[0]


@pytest.fixture(scope="module")
def exported(packaged: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hugging_face_folder(packaged, tmp_path_factory.mktemp("exported"))


def test_every_weight_and_the_geometry_are_the_packaged_files(packaged: Path, exported: Path) -> None:
    ours, theirs = ModelShape.read(packaged), ModelShape.read(exported)
    assert theirs == replace(ours, eos_token_ids=())
    with ExitStack() as stack:
        one, other = open_source(packaged, ours, stack), open_source(exported, theirs, stack)
        assert one.shapes() == other.shapes()
        assert all(torch.equal(one.read(name), other.read(name)) for name in one.shapes())


def test_transformers_continues_it_as_ours_continues_the_file(packaged: Path, exported: Path) -> None:
    prompt = list(Prompts(load_tokenizer(packaged), 3).draw(12).ids)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    ours = LLM(packaged, weights="float32", max_model_len=64, num_blocks=16).generate([prompt], params)[0].token_ids
    theirs = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    assert theirs.generation_config.eos_token_id is None, "it goes on for as long as it is asked"
    made = theirs.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, len(prompt) :]
    assert made.tolist() == list(ours)


def test_prompts_are_read_as_the_same_ids_by_all(packaged: Path, exported: Path) -> None:
    ours, theirs = Prompts(load_tokenizer(packaged), 7), AutoTokenizer.from_pretrained(exported)
    prefix = ours.draw(40)
    for prompt in (prefix, ours.draw(9), ours.draw(64, prefix)):
        assert prompt.text is not None
        assert theirs(prompt.text)["input_ids"] == list(prompt.ids)
        assert Backend.from_file(str(exported / "tokenizer.json")).encode(prompt.text).ids == list(prompt.ids)
    assert ours.draw(64, prefix).ids[:40] == prefix.ids
    again = Prompts(load_tokenizer(packaged), 7)
    assert again.draw(40) == prefix, "a seed says which prompts there are"
    assert again.draw(40) != prefix


def test_of_a_folder_only_the_ends_are_left_out(tmp_path: Path) -> None:
    source = write_safetensors(tmp_path / "source", tiny_config())
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "temperature": 0.5}))
    for _ in range(2):
        folder = hugging_face_folder(source, tmp_path / "target")
    assert (folder / "model.safetensors").resolve() == source / "model.safetensors"
    config = json.loads((folder / "config.json").read_text())
    assert config == {name: value for name, value in tiny_config().items() if name != "eos_token_id"}
    assert json.loads((folder / "generation_config.json").read_text()) == {"temperature": 0.5}
    assert json.loads((source / "config.json").read_text()) == tiny_config()


def test_what_cannot_be_written_for_others_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "q.gguf", tiny_config(), architecture="qwen3")
    with pytest.raises(NotToBeHadError, match=r"q\.gguf cannot be written for other engines"):
        hugging_face_folder(path, tmp_path / "out")
