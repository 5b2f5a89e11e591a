"""Tokenizers from GGUF metadata: SentencePiece by its definition and as transformers reads it, words by every rule."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import processors
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer

from dataplane.errors import CheckpointError
from dataplane.gguf_tokenizer import WHOLE_WORDS, WORDS
from dataplane.models.gguf_file import GGUFFile
from dataplane.request import RequestError
from dataplane.tokenizer import load_tokenizer
from tests.dataplane.test_tokenizer import CORPUS, NUMBERS
from tests.factories.tokenizers import byte_level_gguf, sentencepiece_gguf

PLAIN = [text for text in (*CORPUS, *NUMBERS, "  two  spaces", "the theme: tHE THEMES 12345") if "<|" not in text]
TEXTS = [*PLAIN, "un<think>ed</think>", "a<|end|>b", "<s><s>hi"]
"""The first are what vocabularies are learnt from; the others hold tokens that are matched whole."""


def by_definition(tokens: list[str], scores: list[float], text: str) -> list[int]:
    """SentencePiece's BPE written out: join the best-scored neighbours until none join; bytes for what is left."""
    place = {token: index for index, token in enumerate(tokens)}
    parts = list(text.replace(" ", "▁"))
    while True:
        joins = [(scores[place[a + b]], -at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in place]
        if not joins:
            break
        at = -max(joins)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    ids: list[int] = []
    for part in parts:
        ids += [place[part]] if part in place else [place[f"<0x{byte:02X}>"] for byte in part.encode()]
    return ids


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sentencepiece_gguf(tmp_path_factory.mktemp("spm") / "tiny.gguf", PLAIN)


@pytest.mark.parametrize("text", PLAIN)
def test_sentencepiece_joins_the_best_scored_neighbours(spm: Path, text: str) -> None:
    meta = GGUFFile.open(spm).metadata
    ours = load_tokenizer(spm)
    tokens, scores = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.scores"]
    expected = by_definition(tokens, scores, " " + text) if text else []
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == expected
    assert ours.decode(ids) == text
    assert ours.encode(text) == [1, *ids]


@pytest.mark.parametrize(("architecture", "prefix"), [("phi3", True), ("gemma2", False)])
def test_sentencepiece_ids_are_those_of_transformers(tmp_path: Path, architecture: str, prefix: bool) -> None:
    path = sentencepiece_gguf(tmp_path / "tiny.gguf", PLAIN, architecture=architecture, space_prefix=prefix)
    theirs, _ = convert_gguf_tokenizer(*get_gguf_tokenizer(str(path))[:2])
    ours = load_tokenizer(path)
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ids, skip_special=False) == text or "<" in text


def test_user_defined_tokens_are_text_and_control_tokens_are_not(spm: Path) -> None:
    ours = load_tokenizer(spm)
    ids = ours.encode("a<think>b</s>", add_special_tokens=False)
    assert 260 in ids and ids[-1] == 2
    assert ours.decode(ids) == "a<think> b"
    assert ours.eos_token_ids == (2, 3), "<|end|> ends a turn though the file does not name it"


@pytest.mark.parametrize("name", WORDS)
def test_words_are_cut_as_transformers_cuts_them(tmp_path: Path, name: str) -> None:
    path = byte_level_gguf(tmp_path / "tiny.gguf", PLAIN, name, WORDS[name])
    kind, described = get_gguf_tokenizer(str(path))[:2]
    if name == "stablelm2":  # transformers does not know it; llama.cpp cuts it as qwen2
        described["pre_tokenizer_type"] = "qwen2"
    theirs, _ = convert_gguf_tokenizer(kind, described)
    theirs.model.ignore_merges = name in WHOLE_WORDS  # which transformers leaves out
    ours = load_tokenizer(path)
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False)
        assert ours.decode(ids, skip_special=False) == text
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text


def test_a_text_begins_with_one_bos_where_the_model_wants_it(tmp_path: Path, spm: Path) -> None:
    unwanted = load_tokenizer(sentencepiece_gguf(tmp_path / "no.gguf", PLAIN, add_bos=False))
    wanted = load_tokenizer(spm)
    assert unwanted.encode("hi")[0] != 1
    for tokenizer, count in ((wanted, 1), (unwanted, 0)):
        assert tokenizer.encode("hi").count(1) == count
        assert tokenizer.encode("<s>hi").count(1) == 1
        assert tokenizer.encode("hi", add_special_tokens=False).count(1) == 0


def test_a_folder_that_adds_bos_itself_adds_one(tmp_path: Path, spm: Path) -> None:
    ours = load_tokenizer(spm)
    backend = Backend.from_str(ours._backend.to_str())
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "chat_template": template})
    )
    folder = load_tokenizer(tmp_path)
    for text in TEXTS:
        assert folder.encode(text) == ours.encode(text)
    assert folder.encode(folder.render_chat([{"role": "user", "content": "hi"}])).count(1) == 1
    assert folder.apply_chat_template([{"role": "user", "content": "hi"}]).count(1) == 1


GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}{{ '<start_of_turn>' + m['role'] + '\n' + m['content'] }}{% endfor %}"
)


def test_a_template_that_knows_no_system_role_refuses_the_request_that_has_one(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece_gguf(tmp_path / "tiny.gguf", PLAIN, template=GEMMA))
    question = {"role": "user", "content": "hi"}
    assert tokenizer.apply_chat_template([question])[0] == 1
    with pytest.raises(RequestError, match="System role not supported"):
        tokenizer.apply_chat_template([{"role": "system", "content": "be brief"}, question])


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ raise_exception('never') }}", "takes no question: .*never"),
        ("{{ messages[0].parts.first }}", "takes no question"),
        ("{% if %}", "cannot be compiled"),
    ],
)
def test_a_template_that_always_raises_is_refused_when_it_is_loaded(
    tmp_path: Path, spm: Path, template: str, sentence: str
) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        load_tokenizer(sentencepiece_gguf(tmp_path / "tiny.gguf", PLAIN, template=template))
    (tmp_path / "tokenizer.json").write_text(load_tokenizer(spm)._backend.to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(CheckpointError, match=sentence):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("scores", [1.0], r"1 scores for \d+ tokens"),
        ("scores", None, r"0 scores for \d+ tokens"),
        ("token_type", [1, 2], r"2 token types for \d+ tokens"),
        ("unknown_token_id", 10**6, "unknown token is 1000000"),
        ("tokens", [], "tokens are missing"),
        ("tokens", [1, 2], "tokens are missing"),
        ("model", "plamo2", "tokenizers of kind plamo2 are not supported; gpt2 and llama are"),
        ("model", None, "holds no tokenizer"),
    ],
)
def test_damaged_vocabularies_are_named(
    spm: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: object, sentence: str
) -> None:
    file = GGUFFile.open(spm)
    file.metadata[f"tokenizer.ggml.{key}"] = value
    monkeypatch.setattr(GGUFFile, "open", classmethod(lambda cls, path: file))
    with pytest.raises(CheckpointError, match=sentence):
        load_tokenizer(spm)
