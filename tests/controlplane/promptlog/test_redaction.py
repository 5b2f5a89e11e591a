"""What is taken out of a prompt, what is left in, and that neither can be made slow."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.promptlog.redaction import LONGEST_MATCH, Redacted, Redactor, check_template, luhn
from controlplane.tenants.schemas import Redaction

ALL = Redactor(Redaction)
LONG = 10**6


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("mail ada.lovelace+x@mail.example.co.uk today", "mail [email] today"),
        ("<ada@example.com>", "<[email]>"),
        ("card 4111 1111 1111 1111.", "card [card]."),
        ("4111-1111-1111-1111", "[card]"),
        ("1 4111 1111 1111 1111", "1 [card]"),
        ("1234 5678 4111 1111 1111 1111", "1234 5678 [card]"),
        ("5500005555555559 and 378282246310005", "[card] and [card]"),
        ("call +49 (30) 1234-5678 now", "call [phone] now"),
        ("0301 2345678", "[phone]"),
        ("call (415) 555-2671, or 1-212-555-0199.", "call [phone], or [phone]."),
        ("415-555-2671 (415)555-2671 415.555.2671 415 555 2671", "[phone] [phone] [phone] [phone]"),
        ("tg_abc123_s3cr3ts3cr3t", "[secret]"),
        ("use tga_0123456789abcdef!", "use [secret]!"),
        ("sk-proj-abcdefghijklmnop1234", "[secret]"),
        ("ghp_0123456789abcdefghij0123", "[secret]"),
        ("AKIAIOSFODNN7EXAMPLE", "[secret]"),
        ("Authorization: Bearer abc.def-ghi_jkl", "Authorization: [secret]"),
        ('"password": "hunter2!"', '"[secret]"'),
        ("api_key=abcdef", "[secret]"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl", "[secret]"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n" + "A" * 1600 + "\n-----END", "[secret]-----END"),
    ],
)
def test_what_is_personal_or_secret_is_taken_out(text: str, kept: str) -> None:
    assert ALL.redact(text, LONG).text == kept


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (r'{"to": "ada\u0040example.com"}', '{"to": "[email]"}'),
        (r'{"code": "x = 1\nsk-abcdefghijklmnop1234"}', r'{"code": "x = 1\n[secret]"}'),
        (r'{\\"password\\": \\"hunter2\\"}', r'{\\"[secret]\\"}'),
        ("4111\u00a01111\u00a01111\u00a01111", "[card]"),
        ("4111\u20111111\u20131111\u20141111", "[card]"),
        ("４１１１１１１１１１１１１１１１", "[card]"),
        ("٤١١١ ١١١١ ١١١١ ١١١١", "[card]"),
        ("4111\u200b1111\u200b1111\u200b1111", "[card]"),
        ("ada＠example．com", "[email]"),
        ("ruf 030\u202f12345678 an", "ruf [phone] an"),
    ],
)
def test_what_is_spelled_otherwise_is_taken_out_too(text: str, kept: str) -> None:
    assert ALL.redact(text, LONG).text == kept


@pytest.mark.parametrize(
    "text",
    [
        "The password was wrong, and so is 2 + 2 = 5.",
        "In 1789, 26 million people; 3.14159265358979 is pi.",
        "order 4111 1111 1111 1112",
        "user@host is no address of mail",
        "version 10.2.3.4, port 7310, 2026-11-30",
        "lots of 115-555-2671, 415-155-2671 and 4155552671; items 250 300 4000000; 415-555-2671-9",
        "a secretary's task",
        "skies are blue",
        "価格は１２３円、Größe 4 – 5",
        r"C:\new\temp and \u00e9",
    ],
)
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert ALL.redact(text, LONG).text == text


def test_only_what_was_asked_for_is_taken_out() -> None:
    text = "ada@example.com 4111 1111 1111 1111"
    assert Redactor([Redaction.EMAILS]).redact(text, LONG).text == "[email] 4111 1111 1111 1111"
    assert Redactor([]).redact(text, LONG).text == text


def test_a_tenants_templates_name_what_else_goes() -> None:
    own = Redactor([], ["EMP-######", "@@?#", "a.c"])
    assert own.redact("emp-123456 xyz7 abc a.c", LONG).text == "[redacted] [redacted] abc [redacted]"


@pytest.mark.parametrize("template", ["", "##", "  #", "ä##", "a" * 65, "a\nb"])
def test_what_is_no_template_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match="template"):
        check_template(template)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("see data:image/png;base64,iVBORw0KGgo= and this", "see [image] and this"),
        ("![x](data:image/jpeg;charset=utf-8;base64,/9j/4AAQ)", "![x]([image])"),
        ("DATA:Audio/WAV;Base64,UklGRg", "[audio]"),
        ("data:application/pdf;base64,JVBERi0x, then", "[file], then"),
        ("data:;base64,JVBERi0x", "[file]"),
        (r'{"url": "data:image\/png;base64,iVBOR\/w0KGgo="}', '{"url": "[image]"}'),
        ("data:image/png;base64," + "\n".join(["iVBORw0K" * 9] * 3) + "\nThanks!", "[image]\nThanks!"),
        ("data:text/plain;base64,NDExMSAxMTExIDExMTEgMTExMQ==", "[file]"),
        ("data:image/svg+xml,%3Csvg%3E", "data:image/svg+xml,%3Csvg%3E"),
        ("metadata:image/png is set", "metadata:image/png is set"),
    ],
)
def test_bytes_in_a_text_are_named_by_their_kind_whatever_the_rules(text: str, kept: str) -> None:
    for rules in (ALL, Redactor([])):
        assert rules.redact(text, LONG) == Redacted(kept, int(text != kept), cut=False)


def test_of_bytes_that_are_longer_than_what_is_kept_nothing_is_kept() -> None:
    kept = ALL.redact("look: data:image/png;base64," + "iVBORw0K" * 50_000 + " end", 100)
    assert kept == Redacted("look: [image]", 1, cut=True)


@given(st.integers(0, 400), st.integers(1, 300))
def test_nothing_of_what_goes_is_left_where_the_text_is_cut(before: int, limit: int) -> None:
    for secret in ("ada.lovelace@example.com", "4111 1111 1111 1111", "sk-abcdefghijklmnopqrstuvwxyz"):
        text = " " * before + secret + " and on"
        kept = ALL.redact(text, limit)
        assert not any(secret[start : start + 8] in kept.text for start in range(len(secret) - 8))
        assert kept.cut == (len(text) > limit)


@given(st.text(max_size=300), st.integers(0, 300))
def test_any_text_is_kept_but_for_what_was_replaced(text: str, limit: int) -> None:
    kept = ALL.redact(text, limit)
    if not kept.replaced:
        assert kept.text == text[:limit]


@given(st.integers(0, 10**15))
def test_a_card_number_is_one_by_its_check_digit(number: int) -> None:
    assert sum(luhn(f"{number}{digit}") for digit in range(10)) == 1


@pytest.mark.parametrize(
    "piece",
    [
        "a",
        "a@",
        "a.",
        "1",
        "1 ",
        "1-",
        "1111 ",
        "4111 1111 1111 1112 ",
        "+1",
        "(0",
        "eyJaaaaaaaa-",
        "eyJaaaaaaaa.",
        "sk-",
        "password:",
        "-----BEGIN ",
        "data:image/png;base64,",
        "data:a/a;a=a;",
        "\n" + "A" * 40,
        "\\",
        "\\u0031",
        "é\\n1",
    ],
)
def test_no_text_makes_it_slow(piece: str) -> None:
    """Twice the text takes about twice the time: far from the four times of a quadratic one."""
    own = Redactor(Redaction, ["#" * 64, "@" * 64, "?" * 63 + "!"])

    def seconds(length: int) -> float:
        text = (piece * length)[:length]
        best = 1e9
        for _ in range(3):
            begin = time.thread_time()
            own.redact(text, length)
            best = min(best, time.thread_time() - begin)
        return best

    assert any(seconds(64_000) < 3.2 * seconds(32_000) for _ in range(5)), "a quadratic one is it every time"


def test_the_longest_match_reaches_past_the_cut() -> None:
    key = "-----BEGIN PRIVATE KEY-----" + "A" * 6_000
    assert len(key) < LONGEST_MATCH
    assert "A" not in ALL.redact("x " + key, 10).text
