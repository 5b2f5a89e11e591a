"""Text to token ids and back, from a GGUF file or from a folder with `tokenizer.json`.

Layer: service. Torch-free: the replica's HTTP front tokenizes in a process of its own. It turns messages into a
prompt through the model's own chat template, in a sandbox; it never runs code that a model file brings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from dataplane.chat_template import ChatTemplate
from dataplane.errors import CheckpointError
from dataplane.gguf_tokenizer import SPACE_MARK, begins_with_bos, gguf_backend
from dataplane.models.gguf_config import end_ids
from dataplane.models.gguf_file import GGUFFile
from dataplane.models.shape import eos_ids, read_json
from dataplane.request import RequestError
from dataplane.tools import ToolStyle

__all__ = ["Tokenizer", "load_tokenizer"]

WINDOW_CHARACTERS = 8
"""Characters per token of the limit that are tokenized at once when a long text is measured."""
CUT_TOKENS = 64
"""More tokens than a cut through a text may add to a window of it."""
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """One model's vocabulary. Ids that were never assigned decode to nothing."""

    def __init__(
        self,
        backend: Backend,
        *,
        eos_token_ids: Iterable[int],
        bos_token_id: int | None,
        template: ChatTemplate | None,
    ) -> None:
        """`bos_token_id` begins what `encode` gives, None where the model wants none."""
        self._backend = backend
        self._bos = bos_token_id
        self._template = template
        self._special = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._added = frozenset(backend.get_added_tokens_decoder())
        self._spelling = _Spelling(backend)
        self._bytes: dict[int, bytes] = {}
        self.eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def tool_style(self) -> ToolStyle:
        """How the model writes calls to tools."""
        return ToolStyle.UNTAUGHT if self._template is None else self._template.tool_style

    def encode(self, text: str, *, add_special_tokens: bool = True, limit: int | None = None) -> list[int]:
        """Ids of `text`, after the beginning-of-sequence token where the model wants one.

        With `limit`, a text that is far beyond that many tokens raises RequestError (context_length_exceeded)
        before all of it is tokenized, so that time and memory stay bounded whatever is sent.
        """
        text = _sound(text)
        if limit is not None:
            self._refuse_far_longer(text, limit)
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return self._begun(ids) if add_special_tokens else ids

    def _begun(self, ids: list[int]) -> list[int]:
        """`ids` after one beginning-of-sequence token, where the model wants one: never two, even where the text
        spells it out, as a rendered chat does."""
        if self._bos is None:
            return ids
        spelt = next((at for at, token in enumerate(ids) if token != self._bos), len(ids))
        return [self._bos, *ids[spelt:]]

    def _refuse_far_longer(self, text: str, limit: int) -> None:
        width = WINDOW_CHARACTERS * limit
        if len(text) <= width:
            return
        known = 0
        for start in range(0, len(text), width):
            window = self._backend.encode(text[start : start + width], add_special_tokens=False)
            known += max(0, len(window) - CUT_TOKENS)
            if known > limit:
                raise RequestError(
                    f"this model's context is {limit} tokens and the prompt has more than {known}",
                    "context_length_exceeded",
                    "prompt",
                )

    def render_chat(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt text of `messages`. Raises RequestError when the template is missing or refuses them."""
        if self._template is None:
            raise RequestError(
                "this model has no chat template; use completions instead", "no_chat_template", "messages"
            )
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, **variables)

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        *,
        limit: int | None = None,
        **variables: Any,
    ) -> list[int]:
        """Ids of `messages` as this model's prompt, bounded as in `encode`; `variables` go to the template."""
        text = self.render_chat(messages, add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False, limit=limit)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        raw = b"".join(self.token_bytes(token, skip_special=skip_special) for token in ids)
        return self._spelling.trim(raw).decode("utf-8", "replace")

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """The bytes one token stands for: part of a character, or several. A skipped special token is empty."""
        if skip_special and token_id in self._special:
            return b""
        known = self._bytes.get(token_id)
        if known is None:
            piece = self._backend.id_to_token(token_id) or ""
            known = piece.encode() if token_id in self._added else self._spelling.to_bytes(piece)
            self._bytes[token_id] = known
        return known

    def vocabulary(self) -> tuple[list[bytes], list[int]]:
        """The bytes of every token by id, and the ids of special tokens, which are no text."""
        tokens = [self.token_bytes(token, skip_special=False) for token in range(self.vocab_size)]
        return tokens, sorted(self._special)

    @property
    def trims_first_space(self) -> bool:
        """Whether a text's first space is an artefact of the vocabulary and not shown."""
        return self._spelling.trims_first_space


class _Spelling:
    """How a vocabulary writes bytes: byte-level (GPT-2's alphabet) or SentencePiece (▁ and <0xNN>)."""

    def __init__(self, backend: Backend) -> None:
        parts = _decoder_parts(backend)
        names = {str(part.get("type")) for part in parts}
        self._byte_level = "ByteLevel" in names
        if not self._byte_level and not names & {"Metaspace", "ByteFallback", "Replace"}:
            raise CheckpointError(f"the tokenizer's decoder is not supported: {', '.join(sorted(names)) or 'none'}")
        self._alphabet = {spelt: byte for byte, spelt in _byte_alphabet().items()}
        self.trims_first_space = any(
            part["type"] == "Strip" or (part["type"] == "Metaspace" and part.get("prepend_scheme") != "never")
            for part in parts
        )

    def to_bytes(self, piece: str) -> bytes:
        if self._byte_level:
            values = [self._alphabet.get(character) for character in piece]
            return piece.encode() if None in values else bytes(value for value in values if value is not None)
        byte = BYTE_PIECE.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace(SPACE_MARK, " ").encode()

    def trim(self, raw: bytes) -> bytes:
        return raw[1:] if self.trims_first_space and raw.startswith(b" ") else raw


def load_tokenizer(path: Path | str) -> Tokenizer:
    """The tokenizer of a model: `path` is a GGUF file, or a folder with tokenizer.json.

    Raises CheckpointError when there is none, or one of a kind that is not supported.
    """
    path = Path(path)
    return _from_folder(path) if path.is_dir() else _from_gguf(GGUFFile.open(path))


def _from_gguf(file: GGUFFile) -> Tokenizer:
    meta = file.metadata
    backend = gguf_backend(meta, file.path)
    tokens, template = meta["tokenizer.ggml.tokens"], meta.get("tokenizer.chat_template")
    named = {name: _token(tokens, meta.get(f"tokenizer.ggml.{name}_id")) for name in ("bos_token", "eos_token")}
    bos = meta.get("tokenizer.ggml.bos_token_id")
    return Tokenizer(
        backend,
        eos_token_ids=end_ids(meta),
        bos_token_id=int(bos) if bos is not None and begins_with_bos(meta) else None,
        template=_usable(template, named, file.path) if template else None,
    )


def _from_folder(folder: Path) -> Tokenizer:
    source = folder / "tokenizer.json"
    if not source.exists():
        raise CheckpointError(f"{folder} has no tokenizer.json")
    try:
        backend = Backend.from_file(str(source))
    except Exception as error:  # the library raises bare Exception for every damaged file
        raise CheckpointError(f"{source} cannot be read: {error}") from error
    settings_file = folder / "tokenizer_config.json"
    settings = read_json(settings_file) if settings_file.exists() else {}
    named = {name: _content(settings.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    eos = set(eos_ids(folder))
    if not eos and named["eos_token"]:
        eos = {token for token in [backend.token_to_id(named["eos_token"])] if token is not None}
    template = _folder_template(folder, settings)
    return Tokenizer(
        backend,
        eos_token_ids=eos,
        bos_token_id=_first_added(backend),
        template=_usable(template, named, folder) if template else None,
    )


def _first_added(backend: Backend) -> int | None:
    """The token that the backend puts before every text."""
    begun = backend.encode("a", add_special_tokens=True)
    return begun.ids[0] if begun.special_tokens_mask[:1] == [1] else None


def _usable(source: Any, named: dict[str, str], path: Path) -> ChatTemplate:
    """The compiled template. Raises CheckpointError where not even a plain question can be written with it."""
    if not isinstance(source, str):
        raise CheckpointError(f"{path.name} has a chat template that is no text")
    template = ChatTemplate(source, named)
    try:
        template.render([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    except RequestError as error:
        raise CheckpointError(f"{path.name} has a chat template that takes no question: {error}") from error
    return template


def _folder_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """`chat_template.jinja` if there is one, else the one named default in tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"cannot read {file}: {error}") from error
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        return named[0].get("template") if named else None
    return template


def _decoder_parts(backend: Backend) -> list[dict[str, Any]]:
    """The steps of the backend's decoder, each with its `type`."""
    if backend.decoder is None:
        return []
    whole = json.loads(backend.decoder.__getstate__())
    return list(whole.get("decoders", [whole]))


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's spelling of bytes: printable ones as themselves, the others from U+0100 on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelling = {byte: chr(byte) for byte in printable}
    return spelling | {byte: chr(0x100 + index) for index, byte in enumerate(others)}


def _token(tokens: list[str], token_id: int | None) -> str:
    return tokens[token_id] if token_id is not None and 0 <= token_id < len(tokens) else ""


def _content(value: Any) -> str:
    """A token in tokenizer_config.json is a string or an object with its content."""
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")


def _sound(text: str) -> str:
    """Lone surrogates, which JSON can carry and UTF-8 cannot, become U+FFFD."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace") if not text.isascii() else text
