"""Logins, sessions and admin tokens on real Postgres and Redis, through the real login form."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest
from argon2 import PasswordHasher
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.accounts import repository, service, tokens
from controlplane.accounts.passwords import Passwords
from controlplane.accounts.schemas import Role
from controlplane.accounts.throttle import PAIR
from controlplane.db import transaction
from controlplane.errors import AuthenticationError, ConflictError, InvalidRequestError, NotFoundError
from controlplane.settings import Settings
from tests.controlplane.clients import Deployment, csrf_of, deployment, log_in
from tests.factories.rows import PASSWORD, make_admin_token

COOKIE = "tidegate_session"


@pytest.fixture
async def deployed(settings: Settings) -> AsyncIterator[Deployment]:
    async with deployment(settings, ["tenants", "accounts", "console"]) as running:
        yield running


async def sql(deployed: Deployment, statement: str) -> None:
    async with transaction(deployed.app.state.resources.engine) as session:
        await session.execute(text(statement))


async def inside(deployed: Deployment, cookie: str | None = None) -> bool:
    if cookie:
        deployed.client.cookies.delete(COOKIE)
        deployed.client.cookies.set(COOKIE, cookie)
    answer = await deployed.client.get("/tenants", follow_redirects=False)
    assert answer.status_code in {200, 303}, answer.text
    return answer.status_code == 200


async def test_logging_in_opens_the_console_and_logging_out_closes_it_on_the_server(deployed: Deployment) -> None:
    assert not await inside(deployed)
    await log_in(deployed, deployed.operator_email.upper())
    assert await inside(deployed)
    cookie = deployed.client.cookies[COOKIE]
    token = await csrf_of(deployed.client, "/tenants")
    answer = await deployed.client.post("/logout", headers={"x-csrftoken": token}, follow_redirects=False)
    assert answer.status_code == 303
    assert COOKIE not in deployed.client.cookies
    assert not await inside(deployed, cookie)


async def test_a_login_never_keeps_the_session_id_it_came_with(deployed: Deployment) -> None:
    await log_in(deployed, deployed.operator_email)
    first = deployed.client.cookies[COOKIE]
    token = await csrf_of(deployed.client, "/tenants")
    form = {"email": deployed.operator_email, "password": PASSWORD, "_csrf_token": token}
    await deployed.client.post("/login", data=form, follow_redirects=False)
    second = deployed.client.cookies[COOKIE]
    assert second != first
    assert await inside(deployed, second)
    assert not await inside(deployed, first)


async def test_a_session_id_chosen_by_somebody_else_is_worth_nothing(deployed: Deployment) -> None:
    deployed.client.cookies.set(COOKIE, "a" * 43)
    await log_in(deployed, deployed.operator_email)
    assert not await inside(deployed, "a" * 43)


@pytest.mark.parametrize(
    "ending",
    [
        "UPDATE user_sessions SET last_seen_at = now() - interval '1 hour 1 second'",
        "UPDATE user_sessions SET expires_at = now() - interval '1 second'",
        "UPDATE users SET active = false",
        "DELETE FROM users",
    ],
)
async def test_a_session_ends_by_idling_by_age_and_with_its_user(deployed: Deployment, ending: str) -> None:
    await log_in(deployed, deployed.operator_email)
    assert await inside(deployed)
    await sql(deployed, ending)
    assert not await inside(deployed)


async def test_use_keeps_a_session_from_idling_but_not_beyond_its_age(deployed: Deployment) -> None:
    await log_in(deployed, deployed.operator_email)
    await sql(deployed, "UPDATE user_sessions SET last_seen_at = now() - interval '59 minutes'")
    assert await inside(deployed)
    async with transaction(deployed.app.state.resources.engine) as session:
        idle, left = (
            await session.execute(text("SELECT now() - last_seen_at, expires_at - now() FROM user_sessions"))
        ).one()
    assert idle < timedelta(minutes=1)
    assert timedelta(hours=11) < left <= timedelta(hours=12)


async def test_the_database_holds_no_session_id(deployed: Deployment) -> None:
    await log_in(deployed, deployed.operator_email)
    async with transaction(deployed.app.state.resources.engine) as session:
        rows = (await session.execute(text("SELECT to_jsonb(s)::text FROM user_sessions s"))).scalars().all()
    assert rows
    assert deployed.client.cookies[COOKIE] not in "".join(rows)


async def test_the_error_is_the_same_for_a_wrong_password_and_for_nobody(deployed: Deployment) -> None:
    async def try_login(email: str) -> tuple[int, str]:
        token = await csrf_of(deployed.client)
        form = {"email": email, "password": "wrong password", "_csrf_token": token}
        answer = await deployed.client.post("/login", data=form, follow_redirects=False)
        return answer.status_code, answer.text.replace(email, "<email>")

    assert await try_login(deployed.operator_email) == await try_login("nobody-1@example.com")


async def test_guessing_is_slowed_down_and_the_right_password_is_not_tried_either(deployed: Deployment) -> None:
    token = await csrf_of(deployed.client)
    form = {"email": deployed.operator_email, "password": "wrong password", "_csrf_token": token}
    for _ in range(PAIR.attempts):
        assert (await deployed.client.post("/login", data=form, follow_redirects=False)).status_code == 401
    form["password"] = PASSWORD
    refused = await deployed.client.post("/login", data=form, follow_redirects=False)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) > 0
    assert COOKIE not in refused.cookies


@pytest.mark.parametrize(
    ("email", "password"), [("x" * 300, PASSWORD), ("", ""), ("a@b.c", "p" * 5000), ("\x00", "\x00")]
)
async def test_odd_input_is_an_ordinary_refusal(deployed: Deployment, email: str, password: str) -> None:
    token = await csrf_of(deployed.client)
    form = {"email": email, "password": password, "_csrf_token": token}
    assert (await deployed.client.post("/login", data=form, follow_redirects=False)).status_code == 401


async def test_a_login_upgrades_a_weak_hash(deployed: Deployment) -> None:
    stronger = Passwords(PasswordHasher(time_cost=2, memory_cost=16, parallelism=1))
    deployed.app.state.passwords = stronger
    await log_in(deployed, deployed.operator_email)
    async with transaction(deployed.app.state.resources.engine) as session:
        user = await repository.user_by_email(session, deployed.operator_email)
    assert user is not None
    assert not stronger.outdated(user.password_hash)
    stronger.close()


async def test_ensure_admin_is_repeatable_and_a_new_password_ends_old_sessions(deployed: Deployment) -> None:
    engine = deployed.app.state.resources.engine
    async with transaction(engine) as session:
        await service.ensure_admin(session, "Admin@Example.com", PASSWORD)
        await service.ensure_admin(session, "admin@example.com", PASSWORD)
    await log_in(deployed, "admin@example.com")
    assert await inside(deployed)
    async with transaction(engine) as session:
        await service.ensure_admin(session, "admin@example.com", "another long password")
    assert not await inside(deployed)
    deployed.client.cookies.delete(COOKIE)
    await log_in(deployed, "admin@example.com", "another long password")
    assert await inside(deployed)


@pytest.mark.parametrize(("email", "password", "param"), [("no-at", PASSWORD, "email"), ("a@b.c", "short", "password")])
async def test_a_user_needs_an_email_and_a_long_password(
    session: AsyncSession, email: str, password: str, param: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await service.create_user(session, email=email, password=password, role=Role.VIEWER)
    assert caught.value.param == param


async def test_an_admin_token_lives_until_revoked_or_expired(deployed: Deployment) -> None:
    resources = deployed.app.state.resources
    async with transaction(resources.engine) as session:
        soon = datetime.now(UTC) + timedelta(milliseconds=1)
        ended, _ = await service.create_api_token(session, name="ended", role=Role.OPERATOR, expires_at=soon)
        lives, view = await service.create_api_token(session, name="lives", role=Role.VIEWER)
        with pytest.raises(ConflictError):
            await service.create_api_token(session, name="lives", role=Role.VIEWER)
    await asyncio.sleep(0.01)
    assert await service.principal_of_token(resources, ended.reveal()) is None
    found = await service.principal_of_token(resources, lives.reveal())
    assert found is not None
    assert (found.name, found.role) == ("lives", Role.VIEWER)
    async with transaction(resources.engine) as session:
        first = await service.revoke_api_token(session, view.id)
    async with transaction(resources.engine) as session:
        assert await service.revoke_api_token(session, view.id) == first
    assert await service.principal_of_token(resources, lives.reveal()) is None


async def test_ensure_api_token_gives_the_name_this_secret(deployed: Deployment) -> None:
    resources = deployed.app.state.resources
    for secret in ("first-secret-of-the-bootstrap", "second-secret-of-the-bootstrap"):
        async with transaction(resources.engine) as session:
            await service.ensure_api_token(session, "bootstrap", secret)
    assert await service.principal_of_token(resources, "first-secret-of-the-bootstrap") is None
    assert await service.principal_of_token(resources, "second-secret-of-the-bootstrap") is not None
    async with transaction(resources.engine) as session:
        with pytest.raises(InvalidRequestError):
            await service.ensure_api_token(session, "bootstrap", "short")


async def test_the_admin_api_makes_lists_and_revokes_tokens(deployed: Deployment) -> None:
    made = await deployed.client.post("/api/v1/api-tokens", json={"name": "ci"}, headers=deployed.operator)
    assert made.status_code == 201
    token, view = made.json()["token"], made.json()["view"]
    assert view["role"] == "viewer"
    mine = {"authorization": f"Bearer {token}"}
    assert (await deployed.client.get("/api/v1/me", headers=mine)).json()["name"] == "ci"
    listed = (await deployed.client.get("/api/v1/api-tokens", headers=deployed.operator)).text
    assert "ci" in listed
    assert token not in listed
    gone = await deployed.client.delete(f"/api/v1/api-tokens/{view['id']}", headers=deployed.operator)
    assert gone.json()["revoked_at"]
    assert (await deployed.client.get("/api/v1/me", headers=mine)).status_code == 401


@pytest.mark.parametrize(("field", "value"), [("expires_at", "2020-01-01T00:00:00Z"), ("name", "a\nb"), ("name", "  ")])
async def test_a_token_that_could_never_work_or_be_told_apart_is_not_made(
    deployed: Deployment, field: str, value: str
) -> None:
    asked = {"name": "fine", field: value}
    answer = await deployed.client.post("/api/v1/api-tokens", json=asked, headers=deployed.operator)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def test_users_and_tokens_beyond_one_page_are_listed(deployed: Deployment) -> None:
    """What is not listed can be neither revoked nor shut out."""
    async with transaction(deployed.app.state.resources.engine) as session:
        for number in range(5):
            await service.create_api_token(session, name=f"ci-{number}", role=Role.VIEWER)
    for path in ("/api/v1/api-tokens", "/api/v1/users"):
        whole = (await deployed.client.get(path, headers=deployed.operator)).json()
        assert whole["next"] is None
        seen, after = [], None
        for _ in whole["items"]:
            query: dict[str, str | int] = {"limit": 1} | ({"after": after} if after else {})
            one = (await deployed.client.get(path, params=query, headers=deployed.operator)).json()
            seen += one["items"]
            after = one["next"]
        assert [each["id"] for each in seen] == [each["id"] for each in whole["items"]]
        assert after is None
        junk = await deployed.client.get(path, params={"after": "junk"}, headers=deployed.operator)
        assert (junk.status_code, junk.json()["error"]["param"]) == (400, "after")


async def test_revoking_no_token_is_not_found(session: AsyncSession) -> None:
    from uuid import uuid4

    with pytest.raises(NotFoundError):
        await service.revoke_api_token(session, uuid4())


async def test_tokens_differ_and_odd_ones_are_not_hashed(session: AsyncSession) -> None:
    made = {(await make_admin_token(session)).reveal() for _ in range(20)}
    assert len(made) == 20
    assert tokens.digest("x" * 100_000) is None
    assert tokens.digest("short") is None


async def test_authenticate_answers_who_it_is(deployed: Deployment) -> None:
    state = deployed.app.state
    who = await service.authenticate(
        state.resources,
        state.login_throttle,
        state.passwords,
        email=f" {deployed.viewer_email} ",
        password=PASSWORD,
        address="10.0.0.1",
    )
    assert (who.name, who.role) == (deployed.viewer_email, Role.VIEWER)
    with pytest.raises(AuthenticationError):
        await service.authenticate(
            state.resources, state.login_throttle, state.passwords, email="", password="", address=""
        )


async def test_an_operator_makes_lists_and_changes_users(deployed: Deployment) -> None:
    api = deployed.client
    new = {"email": "Ada@Example.com", "password": PASSWORD, "role": "viewer"}
    made = await api.post("/api/v1/users", json=new, headers=deployed.operator)
    assert made.status_code == 201, made.text
    assert made.json()["email"] == "ada@example.com"
    assert "password" not in made.text
    assert (await api.post("/api/v1/users", json=new, headers=deployed.operator)).status_code == 409
    assert "ada@example.com" in (await api.get("/api/v1/users", headers=deployed.operator)).text
    await log_in(deployed, "ada@example.com")
    assert await inside(deployed)
    path = f"/api/v1/users/{made.json()['id']}"
    changed = await api.patch(path, json={"password": "another long password"}, headers=deployed.operator)
    assert changed.status_code == 200
    assert not await inside(deployed)
    short = await api.patch(path, json={"password": "short"}, headers=deployed.operator)
    assert short.json()["error"]["param"] == "password"
    assert (await api.patch(path, json={"role": "operator"}, headers=deployed.operator)).json()["role"] == "operator"
    assert (await api.patch(path, json={"active": False}, headers=deployed.operator)).json()["active"] is False


async def test_the_last_operator_cannot_be_shut_out_even_by_two_at_once(deployed: Deployment) -> None:
    engine = deployed.app.state.resources.engine
    async with transaction(engine) as session:
        second = await service.create_user(session, email="b@example.com", password=PASSWORD, role=Role.OPERATOR)
        users = await service.list_users(session)
    operators = [user.id for user in users.items if user.role is Role.OPERATOR]
    assert len(operators) == 2
    assert second.id in operators
    answers = await asyncio.gather(
        *(
            deployed.client.patch(f"/api/v1/users/{user_id}", json={"active": False}, headers=deployed.operator)
            for user_id in operators
        )
    )
    assert sorted(answer.status_code for answer in answers) == [200, 409]
    refused = next(answer for answer in answers if answer.status_code == 409)
    assert refused.json()["error"]["code"] == "last_operator"
