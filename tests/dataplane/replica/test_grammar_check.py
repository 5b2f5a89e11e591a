"""Grammars are tried out in a process of their own: whatever that process does, the replica knows what to say."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dataplane.api_error import ApiError
from dataplane.config import find_model
from dataplane.grammar_check import GrammarChecker
from dataplane.protocol import Grammar, GrammarKind
from dataplane.request import RequestError

OBJECT = Grammar(kind=GrammarKind.JSON_OBJECT)
BROKEN = Grammar(kind=GrammarKind.REGEX, text="(")
WORKER = """
import sys, time, os
for number, line in enumerate(sys.stdin):
    verdict = '{{}}'
    {body}
    print(verdict, flush=True)
"""


@asynccontextmanager
async def checker(**options: Any) -> AsyncIterator[GrammarChecker]:
    own = GrammarChecker(find_model("smollm2")[0], **options)
    try:
        yield own
    finally:
        await own.stop()


def worker(body: str) -> tuple[str, ...]:
    """A worker that answers every grammar with a yes, after `body`, which sees the `number` of the question and may
    change the `verdict`."""
    return (sys.executable, "-c", WORKER.format(body=body))


def pid(own: GrammarChecker) -> int:
    process = own._worker
    assert process is not None
    assert process.returncode is None
    return process.pid


async def refusal(own: GrammarChecker, grammar: Grammar) -> str:
    with pytest.raises(RequestError) as caught:
        await own.check(grammar)
    assert (caught.value.code, caught.value.param) == ("invalid_grammar", "structured_outputs")
    return caught.value.message


def text(number: int) -> Grammar:
    return Grammar(kind=GrammarKind.CHOICE, text=f'["{number}"]')


async def test_the_real_worker_takes_the_good_and_refuses_the_bad() -> None:
    async with checker(compile_s=5.0) as own:
        await own.check(OBJECT)
        assert "unclosed" in await refusal(own, BROKEN)
        first = pid(own)
        # Killed while idle: nobody's grammar is to blame.
        os.kill(first, signal.SIGKILL)
        await own.check(text(1))
        assert pid(own) != first


async def test_a_grammar_that_takes_the_cores_time_is_refused() -> None:
    async with checker(compile_s=0.0) as own:
        assert "too long" in await refusal(own, text(1))


async def test_a_worker_that_hangs_is_killed_and_the_next_grammar_is_served() -> None:
    body = "time.sleep(600) if 'hang' in line else None"
    async with checker(command=worker(body), patience_s=0.3) as own:
        await own.check(text(1))
        hung = pid(own)
        slow = Grammar(kind=GrammarKind.REGEX, text="hang")
        assert "too long" in await refusal(own, slow)
        with pytest.raises(ProcessLookupError):
            os.kill(hung, 0)
        await own.check(text(2))
        served = pid(own)
        assert "too long" in await refusal(own, slow), "known by now, and not tried again"
        assert pid(own) == served


async def test_a_stall_that_passes_refuses_no_grammar() -> None:
    """The machine was busy, and the worker with it: the grammar is tried once more, and nothing is held against it."""
    async with checker(compile_s=5.0, patience_s=3.0) as own:
        await own.check(text(1))
        stalled = pid(own)
        os.kill(stalled, signal.SIGSTOP)
        await own.check(text(2))
        assert pid(own) != stalled


@pytest.mark.parametrize(
    "failure",
    ["time.sleep(600)", "os._exit(9)", """verdict = '{"seconds": 9.0}'"""],
    ids=["held up", "killed", "slow"],
)
async def test_what_a_busy_machine_may_have_refused_is_tried_again_after_a_while(tmp_path: Path, failure: str) -> None:
    now, busy = 0.0, tmp_path / "busy"
    busy.touch()
    command = worker(f"if number and os.path.exists({str(busy)!r}): {failure}")
    async with checker(command=command, patience_s=0.3, doubt_s=60.0, clock=lambda: now) as own:
        await refusal(own, text(1))
        busy.unlink()
        now = 59.0
        await refusal(own, text(1))
        now = 61.0
        await own.check(text(1))
        busy.touch()
        now = 1e6
        await own.check(text(1))


async def test_what_the_worker_refuses_by_its_counts_is_asked_once(tmp_path: Path) -> None:
    now, log = 0.0, tmp_path / "asked"
    body = f"""if number: verdict = '{{"error": "malformed"}}'; open({str(log)!r}, 'a').write(line)"""
    async with checker(command=worker(body), clock=lambda: now) as own:
        assert await refusal(own, BROKEN) == "malformed"
        now = 1e9
        assert await refusal(own, BROKEN) == "malformed"
    assert log.read_text().count("\n") == 1


def test_the_worker_times_what_it_is_asked_again() -> None:
    """A grammar kept from the last time would seem to take none."""
    line = b'{"kind": "regex", "text": "(a|b)*a(a|b){9}"}\n'
    options = ("--parent", str(os.getpid()), "--model", str(find_model("smollm2")[0]))
    command = (sys.executable, "-m", "dataplane.grammar_worker", *options)
    done = subprocess.run(command, input=3 * line, capture_output=True, timeout=120, check=True)
    _, first, again = (json.loads(verdict)["seconds"] for verdict in done.stdout.splitlines())
    assert again > first / 3


async def test_a_grammar_that_kills_every_worker_is_refused() -> None:
    async with checker(command=worker("os._exit(9) if 'boom' in line else None")) as own:
        assert "memory" in await refusal(own, Grammar(kind=GrammarKind.REGEX, text="boom"))
        await own.check(text(1))


async def test_a_question_that_is_given_up_does_not_shift_the_answers() -> None:
    body = "time.sleep(600) if 'hang' in line else None"
    async with checker(command=worker(body)) as own:
        await own.check(text(1))
        asked = asyncio.create_task(own.check(Grammar(kind=GrammarKind.REGEX, text="hang")))
        await asyncio.sleep(0.1)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await own.check(text(2))


async def test_one_grammar_asked_by_many_at_once_is_tried_once(tmp_path: Path) -> None:
    log = tmp_path / "asked"
    async with checker(command=worker(f"open({str(log)!r}, 'a').write(line)")) as own:
        await asyncio.gather(*(own.check(text(7)) for _ in range(20)))
    assert log.read_text().count('[\\"7\\"]') == 1


@pytest.mark.parametrize("command", [("/no/such/program",), (sys.executable, "-c", "pass")])
async def test_without_a_worker_nobody_is_told_that_the_grammar_is_bad(command: tuple[str, ...]) -> None:
    async with checker(command=command) as own:
        for _ in range(2):
            with pytest.raises(ApiError) as caught:
                await own.check(OBJECT)
            assert (caught.value.status, caught.value.code) == (503, "grammar_unavailable")
