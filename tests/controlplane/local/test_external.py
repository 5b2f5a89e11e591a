"""A given DATABASE_URL or REDIS_URL is looked at first; what is wrong is one sentence without the password (F33)."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis
from sqlalchemy.engine import make_url

from controlplane.local import external
from controlplane.local.errors import ExitCode, LocalError
from controlplane.settings import Secret

CANARY = "s3cret-canary"


def test_a_working_database_answers_its_version(database_url: str) -> None:
    assert int(external.database_version(Secret(database_url)).split(".")[0]) >= 15


async def test_a_working_redis_answers_its_version(valkey: str, redis: Redis) -> None:
    assert int(external.redis_version(Secret(valkey)).split(".")[0]) >= 7


@pytest.mark.parametrize(
    ("url", "reason", "code"),
    [
        ("nonsense", "is not a URL of the form postgresql://", ExitCode.USAGE),
        (f"mysql://u:{CANARY}@h/d", "must have the form postgresql://", ExitCode.USAGE),
        (f"postgresql://u:{CANARY}@127.0.0.1:1/d", "nothing listens there", ExitCode.SERVICE_UNREACHABLE),
        (f"postgresql://u:{CANARY}@no-such-host.invalid/d", "does not resolve", ExitCode.SERVICE_UNREACHABLE),
        (f"postgresql://u:{CANARY}@127.0.0.1:port/d", "is not a URL", ExitCode.USAGE),
    ],
)
def test_a_broken_database_url_is_one_sentence(url: str, reason: str, code: ExitCode) -> None:
    with pytest.raises(LocalError, match=reason) as refused:
        external.database_version(Secret(url))
    assert refused.value.code is code
    assert refused.value.message.startswith("DATABASE_URL")
    assert CANARY not in refused.value.message


def test_a_wrong_password_and_a_missing_database_are_told_apart(database_url: str) -> None:
    given = make_url(database_url)
    wrong = given.set(password=CANARY).render_as_string(hide_password=False)
    with pytest.raises(LocalError, match="the password or user is wrong") as refused:
        external.database_version(Secret(wrong))
    assert CANARY not in refused.value.message
    absent = given.set(database="absent").render_as_string(hide_password=False)
    with pytest.raises(LocalError, match="the database does not exist"):
        external.database_version(Secret(absent))


@pytest.mark.parametrize(
    ("url", "reason", "code"),
    [
        ("nonsense", "is not a URL of the form redis://", ExitCode.USAGE),
        (f"redis://:{CANARY}@127.0.0.1:1/0", "nothing listens there", ExitCode.SERVICE_UNREACHABLE),
    ],
)
def test_a_broken_redis_url_is_one_sentence(url: str, reason: str, code: ExitCode) -> None:
    with pytest.raises(LocalError, match=reason) as refused:
        external.redis_version(Secret(url))
    assert refused.value.code is code
    assert CANARY not in refused.value.message


def test_a_wrong_redis_password_is_told(valkey: str) -> None:
    parts = make_url(valkey)
    if not parts.password:
        pytest.skip("the given Redis asks for no password")
    with pytest.raises(LocalError, match="the password or user is wrong"):
        external.redis_version(Secret(valkey.replace(parts.password, CANARY)))
