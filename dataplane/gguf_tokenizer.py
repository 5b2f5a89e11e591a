"""A tokenizer's rules from the metadata of a GGUF file: byte-level BPE ("gpt2") and SentencePiece BPE ("llama").

Layer: service. Torch-free. Keys and their defaults are llama.cpp's (`llama-vocab.cpp`). Rules that are not known are
refused: a wrong cut or merge gives other ids, and the model then answers something else without saying so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from dataplane.errors import CheckpointError

__all__ = ["begins_with_bos", "gguf_backend"]

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
SPACE_MARK = "▁"
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CLITICS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CLITICS}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CLITICS}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe"), LLAMA3_WORDS)
    | dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), QWEN2_WORDS)
    | dict.fromkeys(("gpt-4o", "llama4"), GPT4O_WORDS)
    | {"tekken": TEKKEN_WORDS}
)
"""How text is cut into words before merging, by llama.cpp's name of the rule."""
GPT2_WORDS = frozenset({"default", "gpt-2", "gpt2", "phi-2", "mpt", "olmo"})
DIGITS_FIRST = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
"""Every digit is a word; the rest is cut by GPT-2's rule."""
WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
"""Rules under which a word that is a token as a whole is taken without merging."""


def gguf_backend(meta: Mapping[str, Any], path: Path) -> Backend:
    """The tokenizer that `meta` describes, special tokens included. Raises CheckpointError naming what is missing."""
    kind, tokens = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.tokens")
    if kind is None:
        raise CheckpointError(f"{path.name} holds no tokenizer")
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(f"{path.name}: tokenizers of kind {kind} are not supported; gpt2 and llama are")
    if not tokens or not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise CheckpointError(f"{path.name} holds no whole tokenizer: its tokens are missing")
    kinds = meta.get("tokenizer.ggml.token_type", [])
    if kinds and len(kinds) != len(tokens):
        raise CheckpointError(f"{path.name} is damaged: {len(kinds)} token types for {len(tokens)} tokens")
    backend = _byte_level(meta, tokens, path) if kind == "gpt2" else _sentencepiece(meta, tokens, kinds, path)
    _add_tokens(backend, tokens, kinds)
    return backend


def begins_with_bos(meta: Mapping[str, Any]) -> bool:
    """Whether a text is to begin with the beginning-of-sequence token; where no key says, as llama.cpp assumes."""
    usual = meta.get("tokenizer.ggml.model") == "llama" or meta.get("tokenizer.ggml.pre") in WHOLE_WORDS
    return bool(meta.get("tokenizer.ggml.add_bos_token", usual))


def _byte_level(meta: Mapping[str, Any], tokens: list[str], path: Path) -> Backend:
    merges = meta.get("tokenizer.ggml.merges")
    if merges is None:
        raise CheckpointError(f"{path.name} holds no whole tokenizer: its merges are missing")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    name = str(meta.get("tokenizer.ggml.pre", "default"))
    try:
        backend = Backend(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=name in WHOLE_WORDS))
    except Exception as error:  # the library raises bare Exception for merges of tokens that are not there
        raise CheckpointError(f"{path.name} holds a damaged tokenizer: {error}") from error
    backend.pre_tokenizer = _pre_tokenizer(name, path)
    backend.decoder = decoders.ByteLevel()
    return backend


def _pre_tokenizer(name: str, path: Path) -> pre_tokenizers.PreTokenizer:
    """How text is cut before merging; names as llama.cpp writes them."""
    if name in GPT2_WORDS:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in DIGITS_FIRST:
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    words = WORDS.get(name)
    if words is None:
        raise CheckpointError(f"{path.name}: the pre-tokenizer {name} is not supported")
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _sentencepiece(meta: Mapping[str, Any], tokens: list[str], kinds: list[int], path: Path) -> Backend:
    """SentencePiece's BPE (Kudo & Richardson 2018): of all neighbours that join to a token, the best-scored join
    first. As merges, best first; characters that are no token are spelt by their bytes, <0xNN>."""
    scores = meta.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise CheckpointError(
            f"{path.name} holds no whole tokenizer: {len(scores or [])} scores for {len(tokens)} tokens"
        )
    unknown = int(meta.get("tokenizer.ggml.unknown_token_id", 0))
    if not 0 <= unknown < len(tokens):
        raise CheckpointError(f"{path.name} is damaged: its unknown token is {unknown} of {len(tokens)}")
    spelt = [SPACE_MARK * len(token) if token and not token.strip(" ") else token for token in tokens]
    vocabulary = {token: index for index, token in enumerate(spelt)}
    plain = [index for index in range(len(tokens)) if not kinds or kinds[index] not in (UNKNOWN, CONTROL)]
    if str(meta.get("general.architecture", "")).startswith("gemma"):
        # Gemma's scores do not follow the order its merges were learnt in; its ids do.
        plain.sort()
    else:
        plain.sort(key=lambda index: (-scores[index], index))
    backend = Backend(
        models.BPE(
            vocab=vocabulary,
            merges=[pair for index in plain for pair in _joins(spelt[index], vocabulary)],
            unk_token=spelt[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", SPACE_MARK)
    tail: list[Any] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if bool(meta.get("tokenizer.ggml.add_space_prefix", True)):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), spaces])
        tail.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(tail)
    return backend


def _joins(token: str, vocabulary: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Pairs of tokens that make `token`, the pair of the lowest ids first."""
    pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
    known = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
    yield from sorted(known, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))


def _add_tokens(backend: Backend, tokens: list[str], kinds: list[int]) -> None:
    """Control tokens are matched whole and are no text; user-defined ones are matched whole and are."""
    control = [
        AddedToken(tokens[i], normalized=False, special=True)
        for i, kind in enumerate(kinds)
        if kind in (UNKNOWN, CONTROL)
    ]
    defined = [
        AddedToken(tokens[i], normalized=False, special=False)
        for i, kind in enumerate(kinds)
        if kind == USER_DEFINED and backend.token_to_id(tokens[i]) == i
    ]
    backend.add_special_tokens(control)
    backend.add_tokens(defined)
