"""Whether a client's grammar can be used, found out where it can do no harm.

Layer: service. One worker process, started with the first grammar, compiles what the engine core is going to
compile; a grammar that takes too long, too much memory or the worker's life is refused like a malformed one.
Verdicts are kept, so that a grammar in steady use is looked at once. Time and memory also depend on what else the
machine does: what fails by them is tried twice, and again after a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import msgspec

from dataplane.api_error import unavailable
from dataplane.protocol import Grammar, GrammarKind
from dataplane.request import RequestError

logger = logging.getLogger(__name__)

KEPT = 4096
"""Verdicts that are kept, by digest."""
START_S = 60.0
"""How long the worker may take to start."""
RETRY_S = 5.0
TOO_LONG = "the grammar takes too long to compile"
TOO_LARGE = "the grammar takes too much memory to compile"
FIRST = Grammar(kind=GrammarKind.JSON_OBJECT)
"""What a worker shows with that it answers."""


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """The worker's word: `error` is empty for a grammar that can be used, `seconds` the processor time it took."""

    error: str = ""
    seconds: float = 0.0


class _Known(msgspec.Struct, frozen=True):
    """Why a grammar cannot be used, empty when it can, and until when that holds."""

    error: str
    until: float


class GrammarChecker:
    """All methods belong to one event loop. One grammar is tried out at a time."""

    def __init__(
        self,
        model: Path,
        *,
        compile_s: float = 0.3,
        patience_s: float = 5.0,
        doubt_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        command: tuple[str, ...] = (
            sys.executable,
            *(["-P"] if sys.flags.safe_path else []),
            "-m",
            "dataplane.grammar_worker",
        ),
    ) -> None:
        """`compile_s` is the processor time a grammar may take, for it will take as much of the core's; `patience_s`
        is when the worker is killed, whatever it does; `doubt_s` is how long a verdict holds that may be the fault of a
        busy machine."""
        self._model = model
        self._compile_s = compile_s
        self._patience_s = patience_s
        self._doubt_s = doubt_s
        self._clock = clock
        self._command = command
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._busy = asyncio.Lock()
        self._worker: asyncio.subprocess.Process | None = None

    async def check(self, grammar: Grammar) -> None:
        """Raises RequestError (`invalid_grammar`) when the grammar cannot be used, ApiError 503 when nobody can say."""
        key = hashlib.sha256(msgspec.json.encode(grammar)).digest()
        known = self._found(key)
        if known is None:
            async with self._busy:
                known = self._found(key)
                if known is None:
                    known = self._known[key] = await self._tried(grammar)
                    if len(self._known) > KEPT:
                        self._known.popitem(last=False)
        if known.error:
            raise RequestError(known.error, "invalid_grammar", "structured_outputs")

    async def stop(self) -> None:
        """End the worker."""
        worker, self._worker = self._worker, None
        if worker is not None:
            with contextlib.suppress(ProcessLookupError):
                worker.kill()
            await worker.wait()

    def _found(self, key: bytes) -> _Known | None:
        known = self._known.get(key)
        if known is not None and known.until <= self._clock():
            del self._known[key]
            return None
        if known is not None:
            self._known.move_to_end(key)
        return known

    async def _tried(self, grammar: Grammar) -> _Known:
        """What the worker makes of the grammar. It may have been held up, or died, by something else, but not twice."""
        for _ in range(2):
            worker = await self._ready()
            try:
                async with asyncio.timeout(self._patience_s):
                    verdict = await _asked(worker, grammar)
            except TimeoutError:
                await self.stop()
                failure = TOO_LONG
                continue
            except asyncio.CancelledError:
                # Its answer would be taken for that to the next question.
                await self.stop()
                raise
            if verdict is None:
                await self.stop()
                failure = TOO_LARGE
            elif verdict.error or verdict.seconds <= self._compile_s:
                return _Known(verdict.error, math.inf)
            else:
                failure = TOO_LONG
        return _Known(failure, self._clock() + self._doubt_s)

    async def _ready(self) -> asyncio.subprocess.Process:
        """The worker, which has shown by a first grammar that it answers. Raises ApiError 503."""
        if self._worker is not None and self._worker.returncode is None:
            return self._worker
        arguments = (*self._command, "--model", str(self._model), "--parent", str(os.getpid()))
        pipe = asyncio.subprocess.PIPE
        try:
            worker = self._worker = await asyncio.create_subprocess_exec(*arguments, stdin=pipe, stdout=pipe)
            async with asyncio.timeout(START_S):
                verdict = await _asked(worker, FIRST)
        except (OSError, TimeoutError) as error:
            logger.warning("grammars cannot be tried out: %s", error or "the worker does not start")
            verdict = None
        except asyncio.CancelledError:
            await self.stop()
            raise
        if verdict is None or verdict.error:
            await self.stop()
            sentence = verdict.error if verdict else "structured output cannot be prepared at the moment"
            raise unavailable(sentence, code="grammar_unavailable", retry_after_s=RETRY_S)
        return worker


async def _asked(worker: asyncio.subprocess.Process, grammar: Grammar) -> Verdict | None:
    """The worker's verdict; None when it died over it."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        worker.stdin.write(msgspec.json.encode(grammar) + b"\n")
        await worker.stdin.drain()
        line = await worker.stdout.readline()
        return msgspec.json.decode(line, type=Verdict) if line else None
    except (OSError, msgspec.DecodeError, ValueError):
        return None
