"""What `tidegate up` shows: progress while it starts, what to do next, what happens afterwards.

Layer: service. Writes to the terminal only; it decides nothing.
"""

from __future__ import annotations

import shlex
import time
from types import TracebackType
from typing import Self

import msgspec
from rich.console import Console
from rich.status import Status

from controlplane.local.home import Home
from controlplane.local.stack import Running

TITLES = {
    "postgres": "PostgreSQL",
    "valkey": "Valkey",
    "migrations": "migrations",
    "bootstrap": "operator and demo tenant",
    "control": "control plane",
    "gateway": "gateway",
    "worker": "worker with beat",
    "replica": "replica",
    "route": "route to the replica",
}

DEMO_QUESTION = "What is the capital of France? Keep it short."
"""The demo model is sure of every token of its answer, in whichever numbers its weights are kept."""
DEMO_TOKENS = 64


class Display:
    """A `Progress` for a person: a spinner on a terminal, plain lines elsewhere. Use as a context manager."""

    def __init__(self, console: Console, error_console: Console) -> None:
        self._console = console
        self._errors = error_console
        self._status: Status | None = None
        self._pending: list[str] = []
        self._since: dict[str, float] = {}
        self._served: set[str] = set()
        self._stopping = False

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._status = self._console.status("starting")
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.rest()

    def rest(self) -> None:
        """No spinner any more; lines still appear when something happens."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def step(self, name: str) -> None:
        self._since[name] = time.monotonic()
        self._wait_for(name)

    def done(self, name: str, detail: str) -> None:
        self._arrived(name)
        self._line("✓", "green", TITLES.get(name, name), detail)

    def starting(self, name: str) -> None:
        self._wait_for(name)

    def ready(self, name: str, seconds: float) -> None:
        self._arrived(name)
        again = "again " if name in self._served else ""
        self._served.add(name)
        self._line("✓", "green", TITLES.get(name, name), f"ready {again}after {seconds:.1f} s")

    def ended(self, name: str, how: str, restart_in: float) -> None:
        self._line("!", "yellow", TITLES.get(name, name), f"{how}; starts again in {restart_in:.1f} s")

    def looping(self, name: str, line: str) -> None:
        self._line(
            "✗", "red", TITLES.get(name, name), f"keeps ending; from now on one attempt a minute. It said: {line}"
        )

    def stopping(self, name: str) -> None:
        if not self._stopping:
            self._stopping = True
            self.rest()
            self._console.print("stopping (Ctrl-C again to kill)", style="dim")
        self._line("■", "dim", TITLES.get(name, name), "stopping")

    def trouble(self, name: str, message: str) -> None:
        self._line("!", "yellow", TITLES.get(name, name), message)

    def fail(self, message: str) -> None:
        self.rest()
        self._errors.print(f"[bold red]✗[/] {_escape(message)}", soft_wrap=True)

    def _wait_for(self, name: str) -> None:
        self._pending.append(name)
        self._spin()

    def _arrived(self, name: str) -> None:
        if name in self._pending:
            self._pending.remove(name)
        self._spin()

    def _spin(self) -> None:
        if self._status is not None:
            waiting = ", ".join(TITLES.get(name, name) for name in self._pending)
            self._status.update(f"starting {waiting}" if waiting else "starting")

    def _line(self, sign: str, style: str, title: str, detail: str) -> None:
        self._console.print(f"[{style}]{sign}[/] {title:<26}[dim]{_escape(detail)}[/]", soft_wrap=True, highlight=False)


def show_next_steps(console: Console, running: Running, home: Home, python: str) -> None:
    """Everything a newcomer pastes. Printed plain, so that copying brings no decoration along."""
    write = console.out
    write("")
    console.print("[bold]Tidegate is running.[/] Ctrl-C stops it.")
    write("")
    write(f"  Console   {running.console_url}")
    write(f"  Login     {running.admin.email}   password {running.admin.password}   (kept in {home.admin_file})")
    write(f"  Gateway   {running.gateway_url}/v1")
    write(f"  Demo key  {running.demo.key}   (tenant {running.demo.tenant})")
    write("")
    console.print("Ask it with curl:", style="bold")
    write("")
    write(curl_snippet(running))
    write("")
    console.print("or with the openai client:", style="bold")
    write("")
    write(python_snippet(running, python))
    write("")


def curl_snippet(running: Running) -> str:
    body = {
        "model": running.model,
        "stream": True,
        "temperature": 0,
        "max_tokens": DEMO_TOKENS,
        "messages": [{"role": "user", "content": DEMO_QUESTION}],
    }
    return (
        f"curl -N {running.gateway_url}/v1/chat/completions \\\n"
        f"  -H 'Authorization: Bearer {running.demo.key}' -H 'Content-Type: application/json' \\\n"
        f"  -d {shlex.quote(msgspec.json.encode(body).decode())}"
    )


def python_snippet(running: Running, python: str) -> str:
    return (
        f"{shlex.quote(python)} - <<'EOF'\n"
        "from openai import OpenAI\n"
        f'client = OpenAI(base_url="{running.gateway_url}/v1", api_key="{running.demo.key}")\n'
        f'answer = client.chat.completions.create(model="{running.model}", temperature=0,\n'
        f'    max_tokens={DEMO_TOKENS}, messages=[{{"role": "user", "content": "{DEMO_QUESTION}"}}])\n'
        "print(answer.choices[0].message.content)\n"
        "EOF"
    )


def _escape(text: str) -> str:
    return text.replace("[", r"\[")
