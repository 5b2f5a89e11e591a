"""A model that cannot be served ends `tidegate engine` with one sentence that names what is wrong, never with text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer as Backend

from dataplane import config
from dataplane.cli import engine
from dataplane.tokenizer import load_tokenizer
from tests.dataplane.replica.test_cli import run
from tests.factories.models import tiny_config, tiny_weights, write_gguf, write_safetensors
from tests.factories.tokenizers import sentencepiece_gguf

CORPUS = ["the quick brown fox", "jumps over the lazy dog"]


def folder(path: Path, *, leave_out: str = "", template: str | None = None, **overrides: object) -> Path:
    """A whole model: weights, configuration and tokenizer, but for what is said."""
    backend: Backend = load_tokenizer(sentencepiece_gguf(path / "words.gguf", CORPUS))._backend
    configuration = tiny_config(vocab_size=backend.get_vocab_size(), **overrides)
    weights = {name: tensor for name, tensor in tiny_weights(configuration).items() if name != leave_out}
    made = write_safetensors(path / "model", configuration, weights)
    (made / "tokenizer.json").write_text(backend.to_str())
    if template is not None:
        (made / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return made


def without_tokenizer(path: Path) -> Path:
    made = folder(path)
    (made / "tokenizer.json").unlink()
    return made


def misshapen(path: Path) -> Path:
    made = folder(path)
    configuration = json.loads((made / "config.json").read_text())
    weights = tiny_weights(configuration)
    weights["model.norm.weight"] = torch.zeros(63)
    return write_safetensors(made, configuration, weights)


def cut(path: Path) -> Path:
    file = write_gguf(path / "cut.gguf", tiny_config())
    file.write_bytes(file.read_bytes()[:-1])
    return file


def extra(path: Path) -> Path:
    made = folder(path)
    configuration = json.loads((made / "config.json").read_text())
    sinks = {"model.layers.0.self_attn.sinks": torch.zeros(4)}
    return write_safetensors(made, configuration, tiny_weights(configuration) | sinks)


def unknown_type(path: Path) -> Path:
    file = write_gguf(path / "kind.gguf", tiny_config())
    data, name = file.read_bytes(), b"token_embd.weight"
    at = data.index(name) + len(name) + 20
    file.write_bytes(data[:at] + (30_000).to_bytes(4, "little") + data[at + 4 :])
    return file


BAD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (lambda path: folder(path, leave_out="model.norm.weight"), "model lacks model.norm.weight"),
    "misshapen": (misshapen, "model.norm.weight has the shape (63,), expected (64,)"),
    "extra": (extra, "does not have: model.layers.0.self_attn.sinks"),
    "cut": (cut, "cut.gguf is truncated"),
    "architecture": (lambda path: folder(path, model_type="mamba"), "the architecture mamba is not supported"),
    "type": (unknown_type, "token_embd.weight has the unknown type 30000"),
    "no tokenizer": (without_tokenizer, "has no tokenizer.json"),
    "template": (
        lambda path: folder(path, template="{{ raise_exception('never') }}"),
        "model has a chat template that takes no question",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_generate_names_what_is_wrong_with_a_model(tmp_path: Path, kind: str) -> None:
    make, sentence = BAD[kind]
    done = CliRunner().invoke(engine, ["generate", "hi", "--raw", "--model", str(make(tmp_path)), "--num-blocks", "16"])
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert done.stderr.startswith("Error: ") and done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_whole_model_answers(tmp_path: Path) -> None:
    """The control: nothing but the fault of each bad model keeps it from being served."""
    arguments = ["generate", "hi", "--raw", "--model", str(folder(tmp_path)), "--num-blocks", "16", "--max-tokens", "4"]
    done = CliRunner().invoke(engine, arguments)
    assert (done.exit_code, done.stderr) == (0, "")


def test_too_little_memory_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = folder(tmp_path)
    monkeypatch.setattr(config, "available_memory", lambda: 2**16)
    done = CliRunner().invoke(engine, ["generate", "hi", "--raw", "--model", str(made)])
    assert done.exit_code == 2
    assert "too little memory: the weights take" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(("kind", "code"), [("missing", 1), ("no tokenizer", 2)])
def test_serve_ends_before_it_serves(tmp_path: Path, kind: str, code: int) -> None:
    """The front refuses what it reads itself; weights are the core's, which tells the front why it cannot start."""
    make, sentence = BAD[kind]
    model = make(tmp_path)
    status, text = run("serve", "--home", str(tmp_path), "--port", "0", "--model", str(model), "--num-blocks", "16")
    assert status == code
    assert [line for line in text.splitlines() if line.startswith("Error: ")] == [
        line for line in text.splitlines() if sentence in line and line.startswith("Error: ")
    ]
    assert sentence in text
