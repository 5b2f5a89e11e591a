"""The key format: what is minted can be read back, and nothing else can."""

from __future__ import annotations

import hashlib
import pickle
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.tenants import keys
from controlplane.tenants.schemas import KeyGrant


def grant(minted: keys.MintedKey) -> KeyGrant:
    return KeyGrant(
        key_id=minted.key_id,
        secret_hash=minted.secret_hash,
        tenant_id="t",
        tenant="acme",
        cache_salt="salt",
        allowed_models=None,
        revoked=False,
        tenant_active=True,
    )


def test_a_minted_key_reads_back_and_proves_itself() -> None:
    minted = keys.mint()
    plain = minted.plain.reveal()
    prefix, key_id, rest = plain.split("_")
    assert (prefix, len(key_id), len(rest)) == ("tg", 11, 49)
    parsed = keys.parse(plain)
    assert parsed.key_id == minted.key_id == key_id
    assert keys.verify(parsed, grant(minted))
    assert minted.secret_hash == hashlib.sha256(rest[:43].encode()).digest()
    assert plain.endswith(minted.last4)


def test_another_key_proves_nothing() -> None:
    minted, other = keys.mint(), keys.mint()
    assert not keys.verify(keys.parse(other.plain.reveal()), grant(minted))


def test_keys_differ() -> None:
    assert len({keys.mint().plain.reveal() for _ in range(500)}) == 500


@pytest.mark.parametrize("seed", range(20))
def test_any_single_wrong_character_is_caught_without_a_look_up(seed: int) -> None:
    rng = random.Random(seed)
    plain = keys.mint().plain.reveal()
    place = rng.randrange(len(plain))
    wrong = rng.choice([c for c in keys.DIGITS if c != plain[place]])
    with pytest.raises(keys.MalformedKeyError):
        keys.parse(plain[:place] + wrong + plain[place + 1 :])


@given(st.text(max_size=100))
def test_other_text_is_refused_and_never_repeated_in_the_message(text: str) -> None:
    with pytest.raises(keys.MalformedKeyError) as caught:
        keys.parse(text)
    assert len(text) < 5 or text not in str(caught.value)


@pytest.mark.parametrize("damage", [lambda k: k + "\n", lambda k: " " + k, lambda k: k[:-1], lambda k: k.swapcase()])
def test_a_key_with_something_around_it_or_cut_off_is_refused(damage) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(keys.MalformedKeyError):
        keys.parse(damage(keys.mint().plain.reveal()))


def test_f33_a_fresh_key_does_not_print_itself() -> None:
    minted = keys.mint()
    secret = minted.plain.reveal().split("_")[2]
    assert secret not in repr(minted) + str(minted.plain) + f"{minted.plain}"
    with pytest.raises(TypeError):
        pickle.dumps(minted.plain)
