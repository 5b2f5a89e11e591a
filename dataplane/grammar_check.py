"""Whether a client's grammar can be used, found out where it can do no harm.

Layer: service. One worker process, started with the first grammar, compiles what the engine core is going to
compile; a grammar that takes too long, too much memory or the worker's life is refused like a malformed one.
Verdicts are kept, so that a grammar in steady use is looked at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import sys
from collections import OrderedDict
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
FIRST = Grammar(kind=GrammarKind.JSON_OBJECT)
"""What a worker shows with that it answers."""


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """The worker's word: `error` is empty for a grammar that can be used, `seconds` the processor time it took."""

    error: str = ""
    seconds: float = 0.0


class GrammarChecker:
    """All methods belong to one event loop. One grammar is tried out at a time."""

    def __init__(
        self,
        model: Path,
        *,
        compile_s: float = 0.3,
        patience_s: float = 5.0,
        command: tuple[str, ...] = (
            sys.executable,
            *(["-P"] if sys.flags.safe_path else []),
            "-m",
            "dataplane.grammar_worker",
        ),
    ) -> None:
        """`compile_s` is the processor time a grammar may take, for it will take as much of the core's; `patience_s`
        is when the worker is killed, whatever it does."""
        self._model = model
        self._compile_s = compile_s
        self._patience_s = patience_s
        self._command = command
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self._busy = asyncio.Lock()
        self._worker: asyncio.subprocess.Process | None = None

    async def check(self, grammar: Grammar) -> None:
        """Raises RequestError (`invalid_grammar`) when the grammar cannot be used, ApiError 503 when nobody can say."""
        key = hashlib.sha256(msgspec.json.encode(grammar)).digest()
        error = self._known.get(key)
        if error is None:
            async with self._busy:
                error = self._known.get(key)
                if error is None:
                    error = await self._tried(grammar)
                    self._known[key] = error
                    if len(self._known) > KEPT:
                        self._known.popitem(last=False)
        else:
            self._known.move_to_end(key)
        if error:
            raise RequestError(error, "invalid_grammar", "structured_outputs")

    async def stop(self) -> None:
        """End the worker."""
        worker, self._worker = self._worker, None
        if worker is not None:
            with contextlib.suppress(ProcessLookupError):
                worker.kill()
            await worker.wait()

    async def _tried(self, grammar: Grammar) -> str:
        """Why the grammar cannot be used; empty when it can."""
        for _ in range(2):
            worker = await self._ready()
            try:
                async with asyncio.timeout(self._patience_s):
                    verdict = await _asked(worker, grammar)
            except TimeoutError:
                await self.stop()
                return "the grammar takes too long to compile"
            except asyncio.CancelledError:
                # Its answer would be taken for that to the next question.
                await self.stop()
                raise
            if verdict is not None:
                slow = not verdict.error and verdict.seconds > self._compile_s
                return "the grammar takes too long to compile" if slow else verdict.error
            # It may have died of something else, but not twice.
            await self.stop()
        return "the grammar takes too much memory to compile"

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
