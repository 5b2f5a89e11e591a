"""Small vocabularies as GGUF files: byte-level BPE and SentencePiece, trained on what tests encode."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import gguf
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

NORMAL, UNKNOWN, CONTROL, DEFINED, BYTE = 1, 2, 3, 4, 6
SPECIAL = ("<unk>", "<s>", "</s>", "<|end|>")
SPECIAL_KINDS = (UNKNOWN, CONTROL, CONTROL, CONTROL)


def byte_level_gguf(path: Path, corpus: Sequence[str], pre: str, words: str, **keys: object) -> Path:
    """A "gpt2" vocabulary learnt from `corpus` cut by the regex `words`; the file names the rule `pre`."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(words), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
    )
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    kinds = [CONTROL if token in SPECIAL else NORMAL for token in tokens]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return _write(path, "llama", "gpt2", tokens, kinds, pre=pre, merges=merges, **keys)


def sentencepiece_gguf(
    path: Path, corpus: Iterable[str], *, architecture: str = "llama", space_prefix: bool = True, **keys: object
) -> Path:
    """A "llama" vocabulary learnt from `corpus`: special tokens, bytes, a user-defined one, then pieces, best first."""
    backend = Tokenizer(models.BPE())
    backend.train_from_iterator(
        ["▁" + text.replace(" ", "▁") for text in corpus], trainers.BpeTrainer(vocab_size=600, show_progress=False)
    )
    vocabulary = backend.get_vocab()
    pieces = sorted(vocabulary, key=lambda piece: (len(piece) == 1, vocabulary[piece]))
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "<think>", *pieces]
    kinds = [*SPECIAL_KINDS, *[BYTE] * 256, DEFINED, *[NORMAL] * len(pieces)]
    scores = [0.0] * (len(tokens) - len(pieces)) + [-float(rank) for rank in range(len(pieces))]
    return _write(path, architecture, "llama", tokens, kinds, scores=scores, space_prefix=space_prefix, **keys)


def _write(
    path: Path,
    architecture: str,
    kind: str,
    tokens: Sequence[str],
    kinds: Sequence[int],
    *,
    pre: str | None = None,
    merges: Sequence[str] | None = None,
    scores: Sequence[float] | None = None,
    space_prefix: bool | None = None,
    add_bos: bool | None = None,
    template: str | None = None,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(kinds))
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("</s>"))
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    if merges is not None:
        writer.add_token_merges(list(merges))
    if scores is not None:
        writer.add_token_scores(list(scores))
    if space_prefix is not None:
        writer.add_add_space_prefix(space_prefix)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    if template is not None:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
