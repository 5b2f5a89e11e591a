"""The control plane in a process, a Chromium, and pages whose console must stay silent."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from sqlalchemy.engine import make_url

from controlplane.accounts.schemas import Role
from controlplane.db import create_engine, transaction
from controlplane.fleet.service import ensure_pool
from tests.conftest import make_settings
from tests.factories.rows import PASSWORD, make_admin_token, make_tenant, make_user
from tests.services import Databases, free_port
from tests.web.browser.cut import Cut
from tests.web.samples import MODEL, POOL, Reporter

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
OPERATOR, VIEWER = "operator@example.com", "viewer@example.com"
DESKTOP = {"width": 1440, "height": 900}
PHONE = {"width": 390, "height": 844}


@dataclass(frozen=True)
class Site:
    """A running control plane, and the two stores it reaches through relays that can be cut."""

    url: str
    internal_token: str
    admin_token: str
    postgres: Cut
    redis: Cut
    pid: int

    def admin(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {self.admin_token}"})


def relayed(url: str) -> tuple[Cut, str]:
    """A relay to the server of `url`, and the URL through it."""
    parsed = make_url(url)
    assert parsed.port is not None
    relay = Cut((parsed.host or "127.0.0.1", parsed.port))
    through = parsed.set(host="127.0.0.1", port=relay.port).render_as_string(hide_password=False)
    return relay, through


@pytest.fixture(scope="package")
def site(
    postgres: Databases, migrated_template: str, valkey: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """One control plane for the browser tests; each test makes the tenants it changes."""
    home = tmp_path_factory.mktemp("console")
    database = postgres.create("browser", template=migrated_template)
    admin_token = asyncio.run(_seed(home, database, valkey))
    database_relay, database_url = relayed(database)
    redis_relay, redis_url = relayed(valkey)
    settings = make_settings(home, database_url=database_url, redis_url=redis_url)
    environment = {
        **os.environ,
        "DATABASE_URL": database_url,
        "REDIS_URL": redis_url,
        "TIDEGATE_HOME": str(home),
        "TIDEGATE_INTERNAL_TOKEN": settings.internal_token.reveal(),
        "TIDEGATE_SESSION_SECRET": settings.session_secret.reveal(),
    }
    with _serving(environment, home / "control.log") as (url, pid):
        yield Site(url, settings.internal_token.reveal(), admin_token, database_relay, redis_relay, pid)
    postgres.drop(database)


async def _seed(home: Path, database: str, valkey: str) -> str:
    """One operator, one viewer, a tenant and a pool; answers an admin token."""
    engine = create_engine(make_settings(home, database_url=database, redis_url=valkey), pooled=False)
    async with transaction(engine) as session:
        await make_user(session, email=OPERATOR)
        await make_user(session, Role.VIEWER, email=VIEWER)
        await make_tenant(session, "acme")
        await ensure_pool(session, POOL, MODEL)
        token = await make_admin_token(session)
    await engine.dispose()
    return token.reveal()


@contextmanager
def _serving(environment: dict[str, str], log: Path) -> Iterator[tuple[str, int]]:
    port = free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "controlplane", "serve", "control", "--port", str(port)],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        url = f"http://127.0.0.1:{port}"
        try:
            _await_ready(process, url, log)
            yield url, process.pid
        finally:
            process.terminate()
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            if httpx.get(f"{url}/healthz").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    pytest.fail(f"the control plane did not start:\n{log.read_text()}")


@pytest.fixture(scope="package")
def chromium(site: Site) -> Iterator[Browser]:
    """A browser; starts after `site`, whose seeding needs the thread's event loop."""
    program = os.environ.get("TIDEGATE_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("no Chromium: install the package chromium, or name one in TIDEGATE_CHROMIUM")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()


OpenPage = Callable[..., "Page"]
Reporters = Callable[[str], Reporter]


@pytest.fixture
def reporters(site: Site) -> Iterator[Reporters]:
    """Makes replicas by name, each with a gateway before it, that report to the site."""
    made: list[Reporter] = []

    def reporter(replica: str) -> Reporter:
        made.append(Reporter(site.url, site.internal_token, replica))
        return made[-1]

    yield reporter
    for each in made:
        each.close()


@pytest.fixture
def open_page(chromium: Browser, site: Site) -> Iterator[OpenPage]:
    """Opens pages in contexts of their own. At the end no script failed and no policy was violated on any of them."""
    contexts: list[BrowserContext] = []
    complaints: list[str] = []

    def listen(page: Page) -> None:
        page.on("pageerror", lambda error: complaints.append(f"script error: {error}"))
        page.on(
            "console",
            lambda message: complaints.append(f"{message.type}: {message.text}") if _complains(message.text) else None,
        )

    def opened(
        *, viewport: dict[str, int] = DESKTOP, theme: str = "light", cookies: object = None, scripts: bool = True
    ) -> Page:
        context = chromium.new_context(
            base_url=site.url,
            viewport=viewport,  # type: ignore[arg-type]
            color_scheme=theme,  # type: ignore[arg-type]
            java_script_enabled=scripts,
        )
        if cookies is not None:
            context.add_cookies(cookies)  # type: ignore[arg-type]
        contexts.append(context)
        context.set_default_timeout(15_000)
        page = context.new_page()
        listen(page)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


def _complains(text: str) -> bool:
    """Everything but the browser's own note of a status code or connection that a test provoked."""
    provoked = ("Failed to load resource", "net::ERR", "[object Event]", "Response Status Error", "htmx:")
    return "Content Security Policy" in text or ("rror" in text and not any(part in text for part in provoked))


def log_in(page: Page, email: str, password: str = PASSWORD) -> None:
    """Through the form."""
    page.goto("/login")
    page.get_by_label("Email").fill(email)
    page.get_by_label("Password").fill(password)
    page.get_by_role("button", name="Log in").click()


def _session_of(open_page: OpenPage, email: str) -> object:
    page = open_page()
    log_in(page, email)
    page.wait_for_url("**/")
    return page.context.cookies()


_SESSIONS: dict[tuple[str, str], object] = {}


@pytest.fixture
def as_operator(open_page: OpenPage, site: Site) -> OpenPage:
    """`open_page` for somebody logged in; one login serves all tests."""
    return _as(open_page, site, OPERATOR)


@pytest.fixture
def as_viewer(open_page: OpenPage, site: Site) -> OpenPage:
    return _as(open_page, site, VIEWER)


def _as(open_page: OpenPage, site: Site, email: str) -> OpenPage:
    key = (site.url, email)
    if key not in _SESSIONS:
        _SESSIONS[key] = _session_of(open_page, email)

    def opened(**options: object) -> Page:
        return open_page(cookies=_SESSIONS[key], **options)

    return opened
