"""`tidegate up --check`: starts everything, tries the promises a newcomer relies on, prints one line each, stops.

Layer: service. It looks from outside only: over HTTP, as a tenant, an operator and a browser would.
"""

from __future__ import annotations

import html
import http.client
import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from controlplane.local.client import Client, Streamed
from controlplane.local.display import Display
from controlplane.local.errors import ExitCode, LocalError
from controlplane.local.interrupts import Interrupts
from controlplane.local.stack import Options, Ports, Running, Stack
from controlplane.tenants import keys

REVOKED_WITHIN_S = 2.0
SHOWN_WITHIN_S = 15.0
LOOK_EVERY_S = 0.25
BLOCK_SIZE = 16
PROMPT = (
    "You help travellers. Answer in one short sentence and name the city first. "
    "A traveller wants to see the Eiffel Tower, the Louvre and Notre-Dame. Which city in France should they visit?"
)

QUIET = {"TIDEGATE_CANARY_GATEWAYS": "http://127.0.0.1:9"}
"""Canaries find no gateway: figures are compared with the check's own requests."""


class CheckFailedError(Exception):
    """A promise did not hold; one sentence."""


class CheckDisplay(Display):
    """Also remembers what ended unexpectedly."""

    def __init__(self, console: Console, error_console: Console) -> None:
        super().__init__(console, error_console)
        self.ended_units: list[str] = []

    def ended(self, name: str, how: str, restart_in: float) -> None:
        self.ended_units.append(f"{name} {how}")
        super().ended(name, how, restart_in)


def run_check(*, model: str, console: Console, error_console: Console, interrupts: Interrupts) -> int:
    """The exit code: 0 only if everything held."""
    begin = time.monotonic()
    display = CheckDisplay(console, error_console)
    with tempfile.TemporaryDirectory(prefix="tidegate-check-") as folder:
        home = Path(folder)
        home.chmod(0o711)
        stack = Stack(Options(home=home / "home", ports=Ports.free(), model=model), display, {**os.environ, **QUIET})
        code, orderly, held = ExitCode.OK, True, False
        try:
            with interrupts.raised():
                with display:
                    running = stack.start()
                held = Checks(stack, running, display, console).run()
        except LocalError as error:
            display.fail(error.message)
            code = error.code
        except KeyboardInterrupt:
            code = ExitCode.INTERRUPTED
        finally:
            display.rest()
            orderly = stack.stop(interrupts.raised)
    if not orderly:
        code = ExitCode.INTERRUPTED
    if code is ExitCode.OK:
        verdict = "every check held" if held else "not every check held"
        sign, style = ("✓", "green") if held else ("✗", "red")
        console.print(f"[bold {style}]{sign}[/] {verdict}, in {time.monotonic() - begin:.0f} s")
        code = ExitCode.OK if held else ExitCode.FAILED
    return code


class Checks:
    """The promises, in the order they are tried; each needs what the one before left."""

    def __init__(self, stack: Stack, running: Running, display: CheckDisplay, console: Console) -> None:
        self._stack = stack
        self._running = running
        self._display = display
        self._console = console
        self._tenant = Client(running.gateway_url, running.demo.key)
        self._admin = Client(running.console_url, running.admin.api_token)
        self._answers: list[Streamed] = []

    def run(self) -> bool:
        """Print one line for each; True when all held."""
        promises: list[tuple[str, Callable[[], str]]] = [
            ("a streamed request is answered", self._streamed),
            ("the same prompt hits the KV cache", self._repeated),
            ("the Overview's figures show that hit", self._overview),
            ("the Overview page shows that hit", self._page),
            ("an unknown key is refused", self._unknown_key),
            ("a revoked key is refused within 2 s", self._revoked_key),
            ("no process ended meanwhile", self._nothing_ended),
        ]
        held = [self._try(title, promise) for title, promise in promises]
        return all(held)

    def _try(self, title: str, promise: Callable[[], str]) -> bool:
        try:
            detail, held = promise(), True
        except CheckFailedError as error:
            detail, held = str(error), False
        except (OSError, http.client.HTTPException, msgspec.DecodeError, KeyError, TypeError) as error:
            detail, held = f"no usable answer: {type(error).__name__} {error}", False
        sign, style = ("✓", "green") if held else ("✗", "red")
        self._console.print(f"[{style}]{sign}[/] {title:<38}", end="")
        self._console.out(detail, highlight=False)
        self._stack.turn(0.0)
        return held

    def _ask(self) -> Streamed:
        messages = [{"role": "user", "content": PROMPT}]
        got = self._tenant.stream_chat(
            {"model": self._running.model, "messages": messages, "max_tokens": 24, "temperature": 0}
        )
        if got.status != 200 or got.error:
            raise CheckFailedError(f"status {got.status}: {got.error.get('message', 'no message')}")
        if not got.finished or got.first_s is None or not got.usage:
            raise CheckFailedError("the stream ended without text, usage or [DONE]")
        self._answers.append(got)
        return got

    def _streamed(self) -> str:
        got = self._ask()
        return f"first text after {got.first_s or 0.0:.2f} s, {got.events} events: {' '.join(got.text.split())[:60]!r}"

    def _repeated(self) -> str:
        got = self._ask()
        # The last token is always computed again, so a hit ends at the last full block before it.
        expected = (got.prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        _require(expected > 0, "the prompt fills no block")
        _require(
            got.cached_tokens == expected,
            f"cached {got.cached_tokens} of {got.prompt_tokens} prompt tokens, expected {expected}",
        )
        _require(got.text == self._answers[0].text, "the answer differs from the first one")
        return f"{got.cached_tokens} of {got.prompt_tokens} prompt tokens, same answer"

    def _expected_hit(self) -> float:
        prompt = sum(answer.prompt_tokens for answer in self._answers)
        return sum(answer.cached_tokens for answer in self._answers) / prompt if prompt else 0.0

    def _overview(self) -> str:
        expected = self._expected_hit()
        _require(expected > 0, "there was no hit to show")

        def look() -> str | None:
            answer = self._admin.call("GET", "/api/v1/overview")
            if answer.status != 200:
                raise CheckFailedError(f"GET /api/v1/overview answered {answer.status}")
            total: dict[str, Any] = answer.json["total"]
            hit, ttft = total.get("prefix_hit"), total["ttft"]
            if hit is None or abs(hit["value"] - expected) > 1e-9 or ttft["n"] != len(self._answers):
                return None
            return f"prefix hit {hit['value']:.1%}, TTFT p50 {ttft['p50']['value'] * 1000:.0f} ms of n = {ttft['n']}"

        return self._until(look, f"prefix hit is not {expected:.4f} with {len(self._answers)} samples")

    def _page(self) -> str:
        browser = Client(self._running.console_url)
        token = _csrf(browser.call("GET", "/login").body)
        credentials = {"email": self._running.admin.email, "password": self._running.admin.password}
        entered = browser.call("POST", "/login", form={**credentials, "_csrf_token": token})
        _require(entered.status in {200, 302, 303}, f"the login answered {entered.status}")
        wanted = f"{self._expected_hit() * 100:.1f}"

        def look() -> str | None:
            page = browser.call("GET", "/")
            _require(page.status == 200, f"the Overview answered {page.status}")
            words = " ".join(re.sub(r"<[^>]+>", " ", html.unescape(page.body.decode())).split())
            found = re.search(rf"\b{re.escape(wanted)}\s*%", words)
            return f"{found.group()} on the page" if found else None

        return self._until(look, f"{wanted} % is not on the page")

    def _unknown_key(self) -> str:
        unknown = keys.mint().plain.reveal()
        return _require_refused(Client(self._running.gateway_url, unknown), self._running.model, "invalid_api_key")

    def _revoked_key(self) -> str:
        tenant = self._running.demo.tenant
        created = self._admin.call("POST", f"/api/v1/tenants/{tenant}/keys", json={"name": "to be revoked"})
        _require(created.status == 201, f"creating a key answered {created.status}")
        caller = Client(self._running.gateway_url, created.json["key"])
        used = caller.call("GET", "/v1/models")
        _require(used.status == 200, f"the fresh key was answered {used.status}")
        key_id = created.json["view"]["key_id"]
        revoked = self._admin.call("DELETE", f"/api/v1/keys/{key_id}")
        _require(revoked.status == 200, f"revoking answered {revoked.status}")
        begin = time.monotonic()
        while caller.call("GET", "/v1/models").status == 200:
            _require(time.monotonic() - begin <= REVOKED_WITHIN_S, f"still accepted after {REVOKED_WITHIN_S:.0f} s")
            self._stack.turn(0.02)
        took = time.monotonic() - begin
        refused = _require_refused(caller, self._running.model, "api_key_revoked")
        return f"{refused}, {took * 1000:.0f} ms after it was revoked"

    def _nothing_ended(self) -> str:
        _require(not self._display.ended_units, "; ".join(self._display.ended_units))
        return f"{len(self._stack.pids())} supervised processes"

    def _until(self, look: Callable[[], str | None], otherwise: str) -> str:
        """Look again until there is something to see; reports arrive about once a second."""
        deadline = time.monotonic() + SHOWN_WITHIN_S
        while (seen := look()) is None:
            _require(time.monotonic() < deadline, f"{otherwise} after {SHOWN_WITHIN_S:.0f} s")
            self._stack.turn(LOOK_EVERY_S)
        return seen


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise CheckFailedError(otherwise)


def _require_refused(caller: Client, model: str, code: str) -> str:
    answer = caller.call(
        "POST", "/v1/chat/completions", json={"model": model, "messages": [{"role": "user", "content": "Hello"}]}
    )
    _require(answer.status == 401, f"it was answered {answer.status}")
    _require(answer.error_code == code, f"the error's code is {answer.error_code!r}")
    return f"401 {code}"


def _csrf(page: bytes) -> str:
    found = re.search(r'name="_csrf_token"[^>]*value="([^"]+)"|value="([^"]+)"[^>]*name="_csrf_token"', page.decode())
    return html.unescape(found.group(1) or found.group(2)) if found else ""
