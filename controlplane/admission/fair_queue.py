"""A gateway's place in its pools' shared queues, in Redis: waits for its turn, tells what was served.

Layer: scheduling. One call is in the air at a time, and everything that happens meanwhile goes with the next: a busy
gateway makes few large calls. While nobody waits and there is room, requests go at once and are told afterwards. A call
too slow or refused is the sign that Redis is away; the gateway then dispatches
from a queue of its own with its part of the pool, fair among its own requests alone, until Redis answers again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Mapping
from importlib.resources import files

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from controlplane.admission.bands import LINES, Lane
from controlplane.admission.dispatch import Dispatcher, Waiting, part_of
from controlplane.admission.patience import Patience, slices_of
from controlplane.admission.queue import DEAD_S, SharedQueue
from controlplane.admission.room import Room
from controlplane.admission.scripts import script_of
from controlplane.admission.turn_messages import Grant, Rules, Turn, TurnAnswer
from controlplane.redis_pipe import ScriptPipe
from dataplane.scheduling.vtc import TokenCharges

FLUSH_S = 0.05
"""Output is told this long after it was produced, if nothing else is told before."""
BEAT_S = DEAD_S / 4
"""Whoever waits or runs is told of at least so often."""
CALL_TIMEOUT_S = 0.25
AWAY_S = 1.0
"""How long Redis is left alone after a call failed."""
FRESH_S = 1.0
"""How long an answer's room may be used without asking again."""
PREFIX = "tidegate:turn:"

logger = logging.getLogger("tidegate.admission")

_ANSWER = msgspec.msgpack.Decoder(TurnAnswer)
_PARTS = ("", ":served", ":requests", ":gateways", ":queue", ":owned", ":unseen", ":held", ":idle")


def _now() -> float:
    return asyncio.get_running_loop().time()


class QueueFullError(Exception):
    """The pool's queue takes no more requests."""


def keys_of(model: str) -> list[str]:
    """The keys of the queue for `model`, all in one slot of a cluster."""
    base = f"{PREFIX}{{{model}}}"
    return [base + part for part in _PARTS] + [f"{base}:backlog:{line}" for line in range(LINES)]


class TurnScript:
    """`turn` of a model's queue inside Redis. Raises RedisError or TimeoutError when Redis does not answer in time."""

    def __init__(self, store: ScriptPipe | Redis, model: str, timeout_s: float = CALL_TIMEOUT_S) -> None:
        source = files("controlplane.admission").joinpath("lua_dispatch/turn.lua").read_text("utf-8")
        self._script = script_of(store, source)
        self._keys = keys_of(model)
        self._slices = slices_of(timeout_s)

    async def turn(self, message: Turn) -> TurnAnswer:
        async with Patience(self._slices):
            answer: bytes = await self._script(keys=self._keys, args=[msgspec.msgpack.encode(message)])
        return _ANSWER.decode(answer)


class FairQueue:
    """The queue for the replicas of one model, whichever pools they are of, as this gateway uses it. `run` and `listen`
    are to be kept running; both end only by cancellation. Turns go by `pipe` when there is one. `rules` is asked for
    what the replicas hold now, and `wake` is for when that has grown.
    """

    def __init__(
        self,
        redis: Redis,
        model: str,
        gateway: str,
        rules: Callable[[], Rules],
        *,
        pipe: ScriptPipe | None = None,
        charges: TokenCharges | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._redis = redis
        self._channel = f"{keys_of(model)[0]}:{gateway}"
        self._script = TurnScript(pipe or redis, model, timeout_s)
        self._rules = rules
        self._clock = clock
        self._dispatcher = Dispatcher(gateway, charges or TokenCharges())
        self._turns: dict[str, asyncio.Future[Grant]] = {}
        self._wanted = asyncio.Event()
        self._flush: asyncio.TimerHandle | None = None
        self._local: SharedQueue | None = None
        self._again_at = 0.0
        self._gateways = 1
        self._progress: dict[str, Callable[[], int]] = {}
        self._told: dict[str, int] = {}
        self._room = Room()
        self._tag = 0.0
        self.last: TurnAnswer | None = None
        """The latest answer: how full the pool is."""
        self.turns = 0
        """Calls to Redis that were answered."""
        self.failures = 0
        """Calls to Redis that were not."""

    def __len__(self) -> int:
        """Requests that wait or run."""
        return len(self._dispatcher)

    @property
    def away(self) -> bool:
        """Whether the gateway dispatches on its own."""
        return self._local is not None

    @property
    def unsent(self) -> float:
        """Output charges not told yet."""
        return self._dispatcher.unsent

    def adopt_weights(self, weights: Mapping[str, float]) -> None:
        """Take the weights of a share plan, for requests that come from now on."""
        self._dispatcher.weights = weights

    @property
    def contended(self) -> bool:
        """Whether anybody waits for the pool, as far as this gateway knows."""
        return bool(self._turns) or self.last is None or self.last.waiting > 0

    @property
    def gateways(self) -> int:
        """How many gateways share the pool."""
        return self._gateways

    def waiting(self) -> list[Waiting]:
        """This gateway's requests that were not dispatched."""
        return self._dispatcher.waiting() if self._turns else []

    def wake(self) -> None:
        """The pool may hold more than before."""
        self._wanted.set()

    def at_once(self, request: Waiting) -> Grant | None:
        """Dispatch `request` without asking, where nobody waits and the last answer left this gateway room for it; then
        `end` must be called once it is over. None where it has to wait for its turn.
        """
        fresh = _now() - self._room.at <= FRESH_S
        if request.lane is not Lane.SHORT or self.contended or not fresh or not self._room.take(request.tokens):
            return None
        self._dispatcher.begin(request)
        self._flush_soon()
        return Grant(request.request_id, self._tag)

    async def turn_of(self, request: Waiting) -> Grant:
        """Wait until `request` may go; then `end` must be called once it is over. Raises QueueFullError, or
        what `leave` was given. Whoever is cancelled has left the queue.
        """
        turn: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        self._turns[request.request_id] = turn
        self._dispatcher.add(request)
        self._wanted.set()
        try:
            return await turn
        except BaseException:
            self.end(request.request_id)
            raise
        finally:
            self._turns.pop(request.request_id, None)

    def leave(self, request_id: str, error: Exception) -> bool:
        """Make a request that waits give up with `error`; False when it does not wait any more."""
        turn = self._turns.get(request_id)
        if turn is None or turn.done():
            return False
        turn.set_exception(error)
        return True

    def watch(self, request_id: str, progress: Callable[[], int]) -> None:
        """Ask `progress` for the tokens that a dispatched request has generated so far whenever they are to be told."""
        self._progress[request_id] = progress

    def produced(self, request_id: str, tokens: int) -> None:
        """A dispatched request generated `tokens`."""
        self._dispatcher.produced(request_id, tokens)
        self._flush_soon()

    def finish(self, request_id: str, *, output: int | None = None, read: tuple[int, int] | None = None) -> None:
        """A dispatched request is over: `output` tokens in all, if it is known, and of input what `read` says, uncached
        and cached, if the engine has counted it.
        """
        told = self._told.get(request_id, 0)
        progress = self._progress.get(request_id)
        produced = output if output is not None else progress() if progress is not None else told
        if produced != told:
            self._dispatcher.produced(request_id, produced - told)
        if read is not None:
            self._dispatcher.counted(request_id, *read)
        self.end(request_id)

    def end(self, request_id: str) -> None:
        """A dispatched request is over, however it ended."""
        self._progress.pop(request_id, None)
        self._told.pop(request_id, None)
        if self._dispatcher.untold(request_id) and request_id not in self._turns:
            self._room.give_back(self._dispatcher.tokens_of(request_id))
        self._dispatcher.end(request_id)
        if self.contended:
            self._wanted.set()
        else:
            self._flush_soon()

    def _flush_soon(self) -> None:
        if self._flush is None:
            self._flush = asyncio.get_running_loop().call_later(FLUSH_S, self._wanted.set)

    def _collect(self) -> None:
        """Take note of what running requests have generated since it was last told."""
        for request_id, progress in self._progress.items():
            so_far, told = progress(), self._told.get(request_id, 0)
            if so_far > told:
                self._told[request_id] = so_far
                self._dispatcher.produced(request_id, so_far - told)

    async def run(self) -> None:
        """Take turns."""
        while True:
            with contextlib.suppress(TimeoutError):
                pause = FLUSH_S if self._progress and self.contended else BEAT_S
                async with asyncio.timeout(pause if len(self._dispatcher) else None):
                    await self._wanted.wait()
            self._wanted.clear()
            if self._flush is not None:
                self._flush.cancel()
                self._flush = None
            if self._dispatcher.news or len(self._dispatcher):
                await self._take_turn()

    async def _take_turn(self) -> None:
        if self._local is not None and _now() >= self._again_at and await self._try_return():
            self._wanted.set()
            return
        self._collect()
        rules = self._effective_rules()
        message = self._dispatcher.message(rules)
        self._room.asked()
        answer = await self._ask(message)
        if answer is None:
            self._wanted.set()
            return
        if answer.lost:
            self._room = Room()
        else:
            self.last = answer
            self._gateways = max(1, answer.gateways) if self._local is None else self._gateways
            self._room.answered(rules, answer, self._gateways if self._local is None else 1, _now())
        self._tag = max([self._tag, *(grant.tag for grant in answer.grants)])
        dispatched = self._dispatcher.answered(answer)
        for grant in dispatched.grants:
            self._settle(grant.request_id, grant, None)
        for request_id in dispatched.refused:
            self._settle(request_id, None, QueueFullError("the queue of this pool is full"))
        if answer.lost or answer.reaping or self._dispatcher.news:
            self._wanted.set()

    def _effective_rules(self) -> Rules:
        rules = self._rules()
        return rules if self._local is None else part_of(rules, self._gateways)

    async def _ask(self, message: Turn) -> TurnAnswer | None:
        """The answer of Redis or of the own queue; None when Redis failed and the own queue takes over."""
        if self._local is not None:
            return self._local.turn(message, self._clock())
        try:
            answer = await self._script.turn(message)
        except (RedisError, TimeoutError) as error:
            self.failures += 1
            logger.warning("The shared queue does not answer (%s); dispatching on its own", type(error).__name__)
            self._local = SharedQueue()
            self._room = Room()
            self._leave_alone()
            self._dispatcher.move()
            return None
        self.turns += 1
        return answer

    async def _try_return(self) -> bool:
        """Whether Redis answers again; then everything is told to it anew."""
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await self._redis.ping()
        except (RedisError, TimeoutError):
            self._leave_alone()
            return False
        logger.info("The shared queue answers again")
        self._local = None
        self._room = Room()
        self._dispatcher.move()
        return True

    def _leave_alone(self) -> None:
        self._again_at = _now() + AWAY_S
        asyncio.get_running_loop().call_later(AWAY_S, self._wanted.set)

    def _settle(self, request_id: str, grant: Grant | None, error: QueueFullError | None) -> None:
        turn = self._turns.get(request_id)
        if turn is None or turn.done():
            return  # cancelled in this very tick: `turn_of` ends it
        if grant is not None:
            turn.set_result(grant)
        else:
            assert error is not None
            turn.set_exception(error)

    async def listen(self) -> None:
        """Hear of dispatches that other gateways' turns brought about."""
        while True:
            try:
                async with self._redis.pubsub(ignore_subscribe_messages=True) as subscription:
                    await subscription.subscribe(self._channel)
                    self._wanted.set()
                    while True:
                        if await subscription.get_message(timeout=BEAT_S) is not None:
                            self._wanted.set()
            except RedisError:
                self._wanted.set()
            await asyncio.sleep(AWAY_S * random.uniform(0.5, 1.0))  # noqa: S311  # spreads reconnects, hides nothing
