"""F33: what must not be printed is not printed, whatever way it takes."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from litestar import Request, get, post

from controlplane.accounts import tokens
from controlplane.logs import MaskingFormatter, logging_config, secrets_of
from controlplane.settings import Secret, Settings
from controlplane.tenants import keys
from tests.conftest import make_settings
from tests.controlplane.clients import deployment

CANARY = "canary-7f3a9c5e1d"


@pytest.fixture
def secretive(tmp_path: Path) -> Settings:
    settings = make_settings(
        tmp_path,
        database_url=f"postgresql://user:{CANARY}-pg@127.0.0.1:1/x",
        redis_url=f"redis://:{CANARY}-redis@127.0.0.1:1/0",
    )
    return msgspec.structs.replace(
        settings, internal_token=Secret(f"{CANARY}-internal"), session_secret=Secret(f"{CANARY}-session-{'x' * 30}")
    )


@pytest.fixture
def sink(secretive: Settings) -> Iterator[io.StringIO]:
    """Everything any logger says at DEBUG, as the processes would print it."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(MaskingFormatter(secrets_of(secretive)))
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield stream
    root.removeHandler(handler)
    root.setLevel(before)


async def test_f33_a_canary_sent_down_every_path_is_found_in_no_sink(
    settings: Settings, secretive: Settings, sink: io.StringIO
) -> None:
    secrets = {"internal_token": secretive.internal_token, "session_secret": secretive.session_secret}
    async with deployment(msgspec.structs.replace(settings, **secrets), ["tenants", "accounts"]) as deployed:

        async def defect(request: Request[Any, Any, Any]) -> None:
            """The worst kind of bug: it puts the whole request and a secret of ours into its error."""
            body = await request.body()
            raise RuntimeError(f"{dict(request.headers)} {request.cookies} {body!r} {request.url} {CANARY}-internal")

        deployed.app.register(get("/api/v1/defect")(defect))
        deployed.app.register(post("/api/v1/defect")(defect))
        answers = []
        operator = deployed.operator
        for secret in (deployed.operator_token, deployed.tenant_key, f"{CANARY}-bearer"):
            for headers in (
                operator,
                {"authorization": f"Bearer {secret}"},
                {"authorization": f"Basic {secret}"},
                {**operator, "cookie": f"tidegate_session={secret}"},
                {**operator, "x-csrftoken": secret},
            ):
                for path in ("/api/v1/tenants", "/tenants", "/api/v1/defect", "/nowhere"):
                    answers.append(await deployed.client.get(path, headers=headers))
                    answers.append(await deployed.client.post(path, headers=headers, json={"password": secret}))
    said = sink.getvalue()
    assert "RuntimeError" in said, "the defect was not logged, so nothing was shown"
    for secret in (deployed.operator_token, deployed.tenant_key):
        assert secret.removeprefix(tokens.API_PREFIX)[15:] not in said
        assert all(secret[15:] not in answer.text for answer in answers)
    assert CANARY not in said
    assert all(CANARY not in answer.text for answer in answers)


@pytest.mark.parametrize(
    "line",
    [
        "Authorization: Bearer {0}",
        "{{'authorization': 'Bearer {0}'}}",
        "[(b'authorization', b'Bearer {0}')]",
        '{{"authorization": "Basic {0}"}}',
        "bearer%20{0}",
        "Cookie: tidegate_session={0}; theme=dark",
        "Set-Cookie: tidegate_session={0}; Path=/",
        "x-csrftoken: {0}",
        "email=a%40b.c&password={0}&next=/",
        "{{'password': '{0}'}}",
        "_csrf_token={0}",
        "postgresql://tidegate:{0}@127.0.0.1/db",
        "redis://:{0}@127.0.0.1:6379/0",
    ],
)
def test_f33_secrets_are_masked_by_where_they_stand(line: str) -> None:
    said = MaskingFormatter().mask(line.format(CANARY))
    assert CANARY not in said
    assert "***" in said


def test_f33_keys_are_masked_wherever_they_stand_and_stay_recognisable() -> None:
    minted = keys.mint()
    said = MaskingFormatter().mask(f"GET /x?key={minted.plain.reveal()}, then more")
    assert minted.plain.reveal()[15:] not in said
    assert f"tg_{minted.key_id}_***, then more" in said
    cut = minted.plain.reveal()[:-7]
    assert cut[15:] not in MaskingFormatter().mask(cut)


def test_f33_a_traceback_is_masked_too() -> None:
    key = keys.mint().plain.reveal()
    try:
        raise ValueError(f"bad key {key}")
    except ValueError:
        import sys

        record = logging.LogRecord("tidegate", logging.ERROR, "f", 1, "failed", (), sys.exc_info())
    line = json.loads(MaskingFormatter().format(record))
    assert "ValueError" in line["traceback"]
    assert key[15:] not in line["traceback"]


def test_ordinary_lines_stay_as_they_are() -> None:
    for line in ("GET /tenants took 3 ms", "the password was wrong", "http://127.0.0.1:7300/healthz", "token 12 of 40"):
        assert MaskingFormatter(["short", "a-longer-secret"]).mask(line) == line


def test_a_line_is_one_json_object_with_its_extras() -> None:
    record = logging.LogRecord("tidegate.app", logging.WARNING, "f", 1, "two\nlines %s", ("a",), None)
    record.request_id = "abc"
    line = MaskingFormatter().format(record)
    assert "\n" not in line
    said = json.loads(line)
    assert (said["level"], said["message"], said["request_id"]) == ("warning", "two\nlines a", "abc")


def test_every_secret_of_the_settings_is_known_to_the_mask(secretive: Settings) -> None:
    known = secrets_of(secretive)
    for part in ("pg", "redis", "internal"):
        assert f"{CANARY}-{part}" in known


def test_everything_passes_the_mask(secretive: Settings) -> None:
    assert logging_config(secretive)["handlers"]["stderr"]["formatter"] == "masked"
