"""Proving one limit with real requests through a real gateway.

Layer: service. The limit is first closed, so that its refusal shows when the gateway has adopted it; then it leaves
room for exactly one request at its worst. That one passes and tells the room as it was taken; what it did not use is
free after its settlement; and the next, for which the limit then has no room, is refused with all that a refusal
promises. At its worst a prompt has a token a byte; where that does not fit the gateway has a replica count it, so the
room that is left is half of what the engine counted. What cannot be tried is told apart from what fails.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import aiohttp
import msgspec

from controlplane.admission.charges import COUNTERS, MONEY, SIZES, Counter, Use
from controlplane.canaries.ground import Ground, NoGroundError
from controlplane.canaries.probe import PROMPTS, Ask, Probe, body_of
from controlplane.canaries.schemas import Cell, Proof, Verdict
from controlplane.canaries.verdict import Answer, Limited, exceeded, refuses, wrong_refusal, wrong_room
from controlplane.gateway.body import read_inference_body
from controlplane.quotas.schemas import QuotaKind

ADOPTED_S = 5.0
"""A gateway acts on a changed limit within two seconds; more than as long again for a busy machine."""
SETTLED_S = 4.0
PAUSE_S = 0.03
LONGEST_PROOF_S = 15.0
MOST_LEAVING = 2
"""Requests for which use may leave a sliding minute between a look at it and their lease."""
MOST_MORE = 32
"""Requests made so that enough of a window is used."""
STREAMED = (16, 64, 256)
"""Tokens of a stream that is to be still running when the next request is refused."""
ROOMY = 10**12
LIMITS = frozenset(exceeded(kind) for kind in QuotaKind)


class FailedProofError(Exception):
    """The limit does not do what it promises; the message says what."""


class NotRunError(Exception):
    """The proof could not be tried; the message says why."""


async def prove(ground: Ground, client: aiohttp.ClientSession, cell: Cell) -> Proof:
    """Prove the cell's limit, and leave no limit behind. Raises UnreachableError when the gateway does not answer."""
    begun = time.monotonic()
    verdict, why = Verdict.PROVEN, ""
    try:
        async with asyncio.timeout(LONGEST_PROOF_S):
            await _Proof(ground, client, cell).run()
    except FailedProofError as failure:
        verdict, why = Verdict.FAILED, str(failure)
    except (NotRunError, NoGroundError) as reason:
        verdict, why = Verdict.NOT_RUN, str(reason)
    except TimeoutError:
        verdict, why = Verdict.NOT_RUN, f"the probe took longer than {LONGEST_PROOF_S:g} s"
    return Proof(verdict=verdict, why=why, seconds=time.monotonic() - begun)


class _Proof:
    def __init__(self, ground: Ground, client: aiohttp.ClientSession, cell: Cell) -> None:
        self._ground = ground
        self._cell = cell
        self._probe = Probe(client, cell.gateway, cell.endpoint, ground.key)
        self._ask = Ask(model=ground.model)

    async def run(self) -> None:
        cell = self._cell
        if cell.endpoint not in PROMPTS:
            raise NotRunError("there is no probe for this endpoint")
        worst = self._worst()
        if worst == 0:
            raise NotRunError("the pool has no price")
        async with self._ground.limited(cell, 0) as limit:
            await self._until_refused(limit)
            if cell.kind in SIZES:
                await self._size(limit, worst)
            elif COUNTERS[cell.kind] is Counter.HELD:
                await self._held(limit)
            else:
                await self._counted(limit, worst)

    def _worst(self) -> int:
        """Units that a lease takes for one request at most."""
        size = read_inference_body(body_of(self._cell.endpoint, self._ask)).size
        read, written = size.prompt, self._ask.output
        price = self._ground.worst_money(read, written)
        return Use(input=read, uncached_input=read, output=written, money=price).units(self._cell.kind)

    # -- the three shapes of limits ------------------------------------------------------------------------------

    async def _counted(self, limit: Limited, worst: int) -> None:
        """A window: room for one request, of which settlement leaves what was used."""
        before = await self._used(limit)
        limit = await self._ground.change(limit, before + worst)
        first = await self._until_served(limit)
        if wrong := wrong_room(first, limit, before):
            raise FailedProofError(f"within the limit: {wrong}")
        units = await self._settled(limit, first, before, worst)
        if units == 0:
            raise NotRunError("one request costs less than a micro-unit")
        room = self._counted_worst(first) // 2
        used = await self._use_up_to(worst - room, limit, before + units, worst)
        await self._until_refused(await self._ground.change(limit, 0))
        await self._never_passes(await self._ground.change(limit, used + room))

    async def _never_passes(self, limit: Limited) -> None:
        """Above a limit that was closed before, nothing passes; the refusal tells a wait once the gateway has adopted
        it. From a sliding minute earlier use leaves meanwhile, that of the probes of a minute ago above all: what there
        was room for had to pass.
        """
        sliding = COUNTERS[limit.kind] is Counter.RATE
        passed, give_up = 0, time.monotonic() + ADOPTED_S
        while True:
            used = await self._ground.used(limit) if sliding else None
            answer = await self._probe.ask(self._ask)
            if answer.served and (used is None or used + self._counted_worst(answer) > limit.hard):
                passed += 1
            if passed > (MOST_LEAVING if sliding else 0):
                raise FailedProofError(f"a request passed above the limit of {limit.hard}")
            closed = refuses(answer, limit) and not wrong_refusal(answer, limit, never=True)
            if time.monotonic() > give_up or not (closed or answer.served):
                break
            await asyncio.sleep(PAUSE_S)
        if not self._judged(answer, limit):
            raise FailedProofError(f"not refused above the limit, {ADOPTED_S:g} s after it was set")

    async def _use_up_to(self, wanted: int, limit: Limited, used: int, worst: int) -> int:
        """Go on until so much is used that waiting could help even a request at its worst; what is used then."""
        if used >= wanted:
            return used
        limit = await self._ground.change(limit, used + MOST_MORE * worst)
        for _ in range(MOST_MORE):
            used += await self._settled(limit, await self._until_served(limit), used, worst)
            if used >= wanted:
                return used
        raise NotRunError(f"{MOST_MORE} requests use too little to come near the worst of one")

    async def _held(self, limit: Limited) -> None:
        """What runs at once: while one stream runs the next is refused, afterwards it passes."""
        limit = await self._ground.change(limit, 1)
        await self._until_served(limit)
        for tokens in STREAMED:
            ask = msgspec.structs.replace(self._ask, output=tokens)
            async with self._probe.streaming(ask) as (head, reading):
                if not head.served:
                    if refuses(head, limit):
                        raise FailedProofError("refused within the limit: a request that has ended keeps its slot")
                    raise _not_run(head)
                answer = await self._probe.ask(self._ask)
                overlapped = not reading.done()
                await reading
            if self._judged(answer, limit):
                await self._until_served(limit)
                return
            if overlapped:
                raise FailedProofError("a second request passed while one was running")
        raise NotRunError("answers end too soon for two to run at once")

    async def _size(self, limit: Limited, worst: int) -> None:
        """One request: as large as it may be it passes, larger it does not."""
        limit = await self._ground.change(limit, worst)
        first = await self._until_served(limit)
        if limit.kind is QuotaKind.MAX_PROMPT_TOKENS:
            limit = await self._ground.change(limit, self._counted_worst(first) // 2)
            await self._until_refused(limit)
            return
        larger = msgspec.structs.replace(self._ask, output=self._ask.output + 1)
        if not self._judged(await self._probe.ask(larger), limit):
            raise FailedProofError(f"a request larger than the limit of {limit.hard} passed")

    # -- steps -----------------------------------------------------------------------------------------------------

    async def _used(self, limit: Limited) -> int:
        """What earlier probes have used of the window; summed from the ledger when the store does not know it."""
        used = await self._ground.used(limit)
        if used is None:
            await self._ground.change(limit, ROOMY)
            await self._until_served(limit)
            await self._ground.change(limit, 0)
            await self._until_refused(limit)
            used = await self._ground.used(limit)
        if used is None:
            raise NotRunError("what was used of the window is not known")
        return used

    async def _until_refused(self, limit: Limited) -> None:
        """Until the gateway has adopted a closed limit; until then that of before may still hold there."""

        wrong = ""

        def met(answer: Answer) -> bool:
            nonlocal wrong
            earlier = answer.code in LIMITS and not refuses(answer, limit)
            if earlier or not self._judged(answer, limit, adopting=True):
                return False
            wrong = wrong_refusal(answer, limit, never=True)
            return not wrong

        await self._until(met, lambda: f"above the limit: {wrong}" if wrong else "not refused above the limit")

    async def _until_served(self, limit: Limited) -> Answer:
        """Until the gateway has adopted a limit that leaves room for one; what is refused meanwhile takes nothing."""
        return await self._until(
            lambda answer: not self._judged(answer, limit, adopting=True), lambda: "refused within the limit"
        )

    async def _until(self, met: Callable[[Answer], bool], otherwise: Callable[[], str]) -> Answer:
        give_up = time.monotonic() + ADOPTED_S
        while True:
            answer = await self._probe.ask(self._ask)
            if met(answer):
                return answer
            if time.monotonic() > give_up:
                raise FailedProofError(f"{otherwise()}, {ADOPTED_S:g} s after it was set")
            await asyncio.sleep(PAUSE_S)

    async def _settled(self, limit: Limited, answer: Answer, before: int, worst: int) -> int:
        """Wait until what the request did not use is free again; the units it used."""
        expected = self._units(answer, worst)
        give_up = time.monotonic() + SETTLED_S
        while True:
            used = await self._ground.used(limit)
            if used is not None and any(units <= used <= before + units for units in expected):
                return max(used - before, min(expected))
            if time.monotonic() > give_up:
                raise FailedProofError(
                    f"after settlement {used} are used; before it were {before}, and the engine counted "
                    f"{' or '.join(map(str, sorted(expected)))}"
                )
            await asyncio.sleep(PAUSE_S)

    def _units(self, answer: Answer, worst: int) -> set[int]:
        """What the request can have used by the engine's word: of money one amount for each pool it may have run on."""
        usage = answer.usage
        if usage is None:
            raise NotRunError("the engine tells no usage")
        uncached = usage.prompt - usage.cached
        if self._cell.kind in MONEY:
            return self._ground.costs(uncached, usage.cached, usage.output)
        use = Use(input=usage.prompt, uncached_input=uncached, output=usage.output)
        return {use.units(self._cell.kind)}

    def _counted_worst(self, answer: Answer) -> int:
        """Units that a lease takes for such a request when a replica has counted its prompt. Prompts of one length
        differ by a few tokens.
        """
        usage = answer.usage
        if usage is None:
            raise NotRunError("the engine tells no usage")
        read, written = usage.prompt, self._ask.output
        price = self._ground.worst_money(read, written)
        return Use(input=read, uncached_input=read, output=written, money=price).units(self._cell.kind)

    def _judged(self, answer: Answer, limit: Limited, *, never: bool = False, adopting: bool = False) -> bool:
        """True for a refusal by the limit, False for an answer. Raises FailedProofError for a refusal that lacks
        something, and NotRunError for anything else. While `adopting`, the refusal may still be the closed limit's.
        """
        if answer.served:
            return False
        if not refuses(answer, limit):
            raise _not_run(answer)
        if not adopting and (wrong := wrong_refusal(answer, limit, never=never)):
            raise FailedProofError(f"above the limit: {wrong}")
        return True


def _not_run(answer: Answer) -> NotRunError:
    return NotRunError(f"the gateway answered {answer.status} {answer.code}".rstrip())
