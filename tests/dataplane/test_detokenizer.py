"""Streaming text equals whole text for every way of cutting it, and stop strings are found wherever they lie (F40)."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from dataplane.config import find_model
from dataplane.detokenizer import IncrementalDetokenizer, StopScanner
from dataplane.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    "Hello, world!",
    "naïve café — “quotes” … 日本語のテキスト 한국어 العربية",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 thumb, 🇩🇪",
    "def f(x):\n    return x ** 2  # ²\n\n\n\tindented",
    "   leading and trailing   ",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \u200b zero width \ufeff bom",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(find_model("smollm2")[0])


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A SentencePiece-like vocabulary: ▁ for spaces and one token per byte."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for piece in ("▁", "▁the", "▁sea", "é", "th", "e"):
        vocabulary[piece] = len(vocabulary)
    backend = Backend(models.BPE(vocabulary, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    folder: Path = tmp_path_factory.mktemp("spm")
    (folder / "tokenizer.json").write_text(backend.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "e"}))
    return load_tokenizer(folder)


def stream(tokenizer: Tokenizer, chunks: list[list[int]], stop: tuple[str, ...] = ()) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, stop)
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.flush()]


def cuts(ids: list[int], size: int) -> list[list[int]]:
    return [ids[start : start + size] for start in range(0, len(ids), size)]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_pieces_join_to_the_whole_text_and_no_character_is_split(tokenizer: Tokenizer, text: str, size: int) -> None:
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, cuts(ids, size))
    assert "".join(pieces) == text
    assert "�" not in "".join(pieces)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_tokens_in_any_chunks_give_the_text_of_all_at_once(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Also of ids that no text has: invalid UTF-8 and special tokens."""
    ids = data.draw(st.lists(st.integers(0, 49151), max_size=40))
    chunks, at = [], 0
    while at < len(ids):
        size = data.draw(st.integers(1, 7))
        chunks.append(ids[at : at + size])
        at += size
    assert "".join(stream(tokenizer, chunks)) == tokenizer.decode(ids)


def test_whole_decode_is_that_of_the_tokenizers_library(tokenizer: Tokenizer) -> None:
    generator = random.Random(4)
    for _ in range(200):
        ids = [generator.randrange(49152) for _ in range(generator.randrange(1, 30))]
        assert tokenizer.decode(ids) == tokenizer._backend.decode(ids)
        assert tokenizer.decode(ids, skip_special=False) == tokenizer._backend.decode(ids, skip_special_tokens=False)


def test_an_emoji_of_several_tokens_comes_out_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🦜")
    assert len(ids) > 1
    assert stream(tokenizer, cuts(ids, 1)) == [*[""] * (len(ids) - 1), "🦜", ""]


def test_bytes_that_complete_no_character_are_replaced_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🦜")
    assert stream(tokenizer, cuts(ids[:-1], 1)) == ["a", *[""] * (len(ids) - 2), "�"]


def test_special_tokens_are_not_shown_unless_asked_for(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>")
    assert "".join(stream(tokenizer, [ids])) == "hi"
    shown = IncrementalDetokenizer(tokenizer, skip_special=False)
    assert shown.push(ids) + shown.flush() == "<|im_start|>hi<|im_end|>"


def test_byte_fallback_joins_bytes_and_drops_the_artificial_first_space(byte_fallback: Tokenizer) -> None:
    the, sea = 257, 258
    ids = [the, sea, 0xF0, 0x9F, 0xA6, 0x9C, 259, sea]
    for size in (1, 2, 8):
        assert "".join(stream(byte_fallback, cuts(ids, size))) == "the sea🦜é sea"
    assert byte_fallback.decode(ids) == "the sea🦜é sea"
    assert byte_fallback._backend.decode(ids) == "the sea🦜é sea"
    assert byte_fallback.eos_token_ids == (261,)


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_a_stop_string_is_found_across_tokens_and_left_out(tokenizer: Tokenizer, size: int) -> None:
    ids = tokenizer.encode("The answer is forty-two. END of story")
    detokenizer = IncrementalDetokenizer(tokenizer, ("two. EN",))
    text = "".join(detokenizer.push(chunk) for chunk in cuts(ids, size)) + detokenizer.flush()
    assert text == "The answer is forty-"
    assert detokenizer.stopped == "two. EN"


@pytest.mark.parametrize("size", [1, 3, 50])
def test_a_stop_string_that_is_complete_before_min_tokens_is_text(tokenizer: Tokenizer, size: int) -> None:
    ids = tokenizer.encode("one END two END three")
    second = next(n for n in range(len(ids)) if tokenizer.decode(ids[: n + 1]).count("END") == 2)
    for min_tokens, expected in ((0, "one "), (second + 1, "one END two "), (second + 2, "one END two END three")):
        detokenizer = IncrementalDetokenizer(tokenizer, ("END",), min_tokens=min_tokens)
        text = "".join(detokenizer.push(chunk) for chunk in cuts(ids, size)) + detokenizer.flush()
        assert text == expected


def test_text_that_may_begin_a_stop_string_is_held_until_it_is_known() -> None:
    scanner = StopScanner(["###"])
    assert [scanner.push(part) for part in ("a#", "#", "b##", "c")] == ["a", "", "##b", "##c"]
    assert scanner.push("#") == ""
    assert scanner.flush() == "#"
    assert scanner.found is None


def test_a_stop_string_across_characters_of_several_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one 🦜🦜 two")
    for size in (1, 2, 3):
        detokenizer = IncrementalDetokenizer(tokenizer, ("🦜 t",))
        assert "".join(detokenizer.push(chunk) for chunk in cuts(ids, size)) + detokenizer.flush() == "one 🦜"


@settings(max_examples=400, deadline=None)
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    data=st.data(),
)
def test_stops_do_not_depend_on_chunks(text: str, stops: list[str], data: st.DataObject) -> None:
    """The oracle reads character by character and stops as soon as the text so far ends with a stop string."""
    expected, found = text, None
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            found = max(ending, key=len)
            expected = text[: end - len(found)]
            break
    scanner, shown, at = StopScanner(stops), "", 0
    while at < len(text):
        size = data.draw(st.integers(1, 6))
        shown += scanner.push(text[at : at + size])
        at += size
    assert shown + scanner.flush() == expected
    assert scanner.found == found


def test_nothing_comes_after_a_stop() -> None:
    scanner = StopScanner(["x"])
    assert scanner.push("axb") == "a"
    assert scanner.push("c") == ""
    assert scanner.flush() == ""
