"""Settings from the environment: what a process would stumble over later is refused, named and said in plain words."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.settings import Secret, Settings, SettingsError, default_home

CANARY = "s3cret-canary"
GOOD = {
    "DATABASE_URL": f"postgresql://u:{CANARY}@127.0.0.1:5432/d",
    "REDIS_URL": f"redis://:{CANARY}@127.0.0.1:6379/0",
    "TIDEGATE_INTERNAL_TOKEN": f"{CANARY}-internal",
    "TIDEGATE_SESSION_SECRET": f"{CANARY}-session",
}


def refused(**given: str) -> str:
    with pytest.raises(SettingsError) as error:
        Settings.from_env(GOOD | given)
    sentence = str(error.value)
    assert CANARY not in sentence
    assert "`" not in sentence  # no type names of a library
    return sentence


def test_what_is_not_said_has_its_default() -> None:
    settings = Settings.from_env({**GOOD, "TIDEGATE_MAX_IN_FLIGHT": "", "TIDEGATE_LOG_LEVEL": "debug"})
    assert settings.home == Path(".tidegate").absolute()
    assert (settings.max_in_flight, settings.stale_after_s, settings.lost_after_s) == (1024, 5.0, 15.0)
    assert settings.log_level == "debug"
    assert not settings.metrics_open


@pytest.mark.parametrize("name", sorted(GOOD))
def test_what_must_be_said_is_named(name: str) -> None:
    assert refused(**{name: ""}) == f"{name} is not set"


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("TIDEGATE_MAX_IN_FLIGHT", "many", "a whole number from 1 to 1000000"),
        ("TIDEGATE_MAX_IN_FLIGHT", "0", "a whole number from 1 to 1000000"),
        ("TIDEGATE_MAX_IN_FLIGHT", "99999999999999999999", "a whole number from 1 to 1000000"),
        ("TIDEGATE_MAX_BODY_BYTES", "-1", "a whole number of bytes from 1 to 1073741824"),
        ("TIDEGATE_UPSTREAM_TIMEOUT_S", "0", "a number of seconds above 0 and up to 86400"),
        ("TIDEGATE_UPSTREAM_TIMEOUT_S", "inf", "a number of seconds above 0 and up to 86400"),
        ("TIDEGATE_STALE_AFTER_S", "-5", "a number of seconds above 0 and up to 86400"),
        ("TIDEGATE_LOST_AFTER_S", "nan", "a number of seconds above 0 and up to 86400"),
        ("TIDEGATE_REPORT_INTERVAL_S", "0", "a number of seconds above 0 and up to 86400"),
        ("TIDEGATE_LEASE_DEADLINE_MS", "0", "a whole number of milliseconds from 1 to 60000"),
        ("TIDEGATE_LEASE_DEADLINE_MS", "2.5", "a whole number of milliseconds from 1 to 60000"),
        ("TIDEGATE_LEASE_TTL_S", "2", "a number of seconds from 3 to 3600"),
        ("TIDEGATE_ASSUMED_CONTEXT", "0", "a whole number of tokens from 1 to 2147483648"),
        ("TIDEGATE_METRICS_OPEN", "maybe", "true or false"),
        ("TIDEGATE_COOKIE_SECURE", "2", "true or false"),
        ("TIDEGATE_LOG_LEVEL", "LOUD", "one of CRITICAL, ERROR, WARNING, INFO, DEBUG"),
        ("TIDEGATE_CONTROL_URL", "127.0.0.1:7300", "an address such as http://127.0.0.1:7300"),
        ("TIDEGATE_PUBLIC_GATEWAY_URL", "ftp://x", "an address such as http://127.0.0.1:7300"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_wanted(name: str, value: str, wanted: str) -> None:
    assert refused(**{name: value}) == f"{name}={value!r} is not valid: it must be {wanted}"


@pytest.mark.parametrize("value", ["../elsewhere", "a/b", "..", "x" * 64])
def test_a_gateway_id_is_a_folder_name(value: str) -> None:
    assert "letters, digits, dots, dashes and underscores" in refused(TIDEGATE_GATEWAY_ID=value)


@pytest.mark.parametrize("url", ["http://h:99999", "http://h:port", "http://h:0", "http://:7300", "http://[::1"])
def test_an_address_names_a_host_and_a_possible_port(url: str) -> None:
    assert refused(TIDEGATE_CONTROL_URL=url) == f"TIDEGATE_CONTROL_URL={url!r} is not valid: its host or port is wrong"


def test_a_lease_outlives_a_missed_renewal() -> None:
    assert refused(TIDEGATE_LEASE_DEADLINE_MS="20000") == (
        "TIDEGATE_LEASE_DEADLINE_MS=20000 is not valid: it must be less than a third of TIDEGATE_LEASE_TTL_S, "
        "which is 60 s"
    )
    assert Settings.from_env({**GOOD, "TIDEGATE_LEASE_DEADLINE_MS": "20000", "TIDEGATE_LEASE_TTL_S": "61"})


def test_a_replica_is_stale_before_it_is_lost() -> None:
    assert refused(TIDEGATE_STALE_AFTER_S="20") == (
        "TIDEGATE_STALE_AFTER_S=20 is not valid: it must be less than TIDEGATE_LOST_AFTER_S, which is 15"
    )
    assert "TIDEGATE_STALE_AFTER_S=5 " in refused(TIDEGATE_LOST_AFTER_S="5")
    assert Settings.from_env({**GOOD, "TIDEGATE_STALE_AFTER_S": "20", "TIDEGATE_LOST_AFTER_S": "21"})


@pytest.mark.parametrize(
    "url",
    [
        "nonsense",
        f"mysql://u:{CANARY}@h/d",
        f"postgresql://u:{CANARY}@h",
        f"postgresql://u:{CANARY}@h:port/d",
        f"postgresql://u:{CANARY}@h:70000/d",
        f"postgresql://u:{CANARY}[@h/d",
    ],
)
def test_a_malformed_database_url_is_refused_without_its_password(url: str) -> None:
    assert "the form postgresql://user:password@host:port/database" in refused(DATABASE_URL=url)


@pytest.mark.parametrize(
    "url",
    [
        "nonsense",
        f"http://:{CANARY}@h/0",
        f"redis://:{CANARY}@h:port/0",
        f"redis://:{CANARY}@h:70000/0",
        f"redis://:{CANARY}@h/first",
        f"redis://:{CANARY}@/0",
        f"redis://:{CANARY}@h/0?socket_timeout=long",
    ],
)
def test_a_malformed_redis_url_is_refused_without_its_password(url: str) -> None:
    assert "the form redis://:password@host:port/database" in refused(REDIS_URL=url)


@pytest.mark.parametrize(
    "given",
    [
        {"DATABASE_URL": "postgresql:///d?host=/run/postgresql"},
        {"DATABASE_URL": "postgresql+asyncpg://u:a%2Fb@[::1]:5432/d"},
        {"REDIS_URL": "redis://h"},
        {"REDIS_URL": "rediss://user:a%23b@[::1]:6380/3"},
        {"TIDEGATE_CONTROL_URL": "https://[::1]:7300/tidegate"},
    ],
)
def test_a_good_url_is_taken(given: dict[str, str]) -> None:
    Settings.from_env(GOOD | given)


@pytest.mark.parametrize("name", ["TIDEGATE_INTERNAL_TOKEN", "TIDEGATE_SESSION_SECRET"])
def test_a_secret_that_can_be_guessed_is_refused(name: str) -> None:
    assert refused(**{name: "letmein"}) == f"{name} must have at least 16 characters"


def test_the_home_is_the_variables_else_beside_us() -> None:
    assert default_home({}) == default_home({"TIDEGATE_HOME": ""}) == Path(".tidegate")
    assert default_home({"TIDEGATE_HOME": "/elsewhere"}) == Path("/elsewhere")


def test_a_secret_does_not_print() -> None:
    secret = Secret(CANARY)
    assert CANARY not in f"{secret} {secret!r} {secret:>40}"
    assert secret.reveal() == CANARY
