"""POST /v1/chat/completions and /v1/completions, streamed and whole.

Layer: service. Turns an exchange into an attempt and the attempt's text into an answer. Owns the order of what
is sent and that an attempt nobody reads is freed in the engine at once. It never counts tokens: the attempt
does.

The answer's status is sent with the first token, not before: until then a failure is still an HTTP error that
the gateway may retry elsewhere. The role comes with the first token too, so that nothing looks like a token
before there is one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dataplane.answer import ChoiceWriter
from dataplane.api_error import ApiError, invalid, unavailable
from dataplane.attempt import Attempt, Choice
from dataplane.caller import Caller
from dataplane.http_exchange import ClientGoneError, Exchange, Receive, Scope, Send
from dataplane.openai import Call, ChatCall, parse_chat, parse_completion
from dataplane.openai_bodies import DONE, Responder, error_event, usage
from dataplane.protocol import HEADER_REPLICA, HEADER_REQUEST, FinishReason, ReplicaState
from dataplane.replica import Replica

logger = logging.getLogger(__name__)

EVENT_STREAM = ("content-type", "text/event-stream; charset=utf-8")
JSON = ("content-type", "application/json")
NOT_NOW = ("engine_overloaded", "engine_unavailable")
"""Refusals by the core that say nothing of the request; all the others are final."""
INTERNAL = ApiError(500, "the replica failed to answer this request", code="internal_error")

Parser = Callable[[bytes, str], Call]
Headers = list[tuple[str, str]]


class GenerationEndpoint:
    """One of the two generating routes as an ASGI application."""

    def __init__(self, replica: Replica, parse: Parser) -> None:
        self._replica = replica
        self._parse = parse

    @classmethod
    def chat(cls, replica: Replica) -> GenerationEndpoint:
        return cls(replica, parse_chat)

    @classmethod
    def completions(cls, replica: Replica) -> GenerationEndpoint:
        return cls(replica, parse_completion)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        config = self._replica.config
        accepted = self._replica.monotonic()
        exchange = Exchange(scope, receive, send, timeout_s=config.client_timeout_s)
        headers = [(HEADER_REPLICA, config.replica)]
        try:
            self._admit(exchange)
            caller = Caller.from_headers(exchange.headers)
            headers.append((HEADER_REQUEST, caller.request_id))
            call = self._parse(await exchange.body(config.max_body_bytes), config.served_model)
            attempt = await self._replica.begin(call, caller, accepted)
            await self._deliver(exchange, call, attempt, headers)
        except ApiError as error:
            await _fail(exchange, error, headers)
        except ClientGoneError:
            pass
        except Exception:
            logger.exception("a request failed in the replica's front")
            await _fail(exchange, INTERNAL, headers)
        finally:
            await exchange.close()

    def _admit(self, exchange: Exchange) -> None:
        """Refuse before anything is read. Raises ApiError."""
        if exchange.method != "POST":
            raise ApiError(405, "this address takes POST only", code="method_not_allowed")
        if not self._replica.config.admits(exchange.authorization):
            raise ApiError(401, "the bearer token is missing or wrong", code="invalid_api_key")
        self._replica.check_open()

    async def _deliver(self, exchange: Exchange, call: Call, attempt: Attempt, headers: Headers) -> None:
        """Send the answer; whatever ends it early frees the attempt in the engine."""
        chat = isinstance(call, ChatCall)
        responder = Responder(
            response_id=f"{'chatcmpl' if chat else 'cmpl'}-{attempt.caller.attempt_id}",
            model=call.model,
            created=int(attempt.started_at),
            chat=chat,
            show_null_usage=call.include_usage and not attempt.caller.usage_hidden,
        )

        def on_gone() -> None:
            attempt.cancel()
            attempt.changed.set()

        exchange.watch(on_gone)
        try:
            if call.stream:
                writers = self._writers(call, attempt.choices, responder)
                await _Stream(exchange, attempt, responder, headers, writers).run(with_usage=call.include_usage)
            else:
                await _finished(exchange, attempt)
                writers = self._writers(call, _chosen(call, attempt), responder)
                body = responder.whole([writer.answer() for writer in writers], _usage(attempt))
                await exchange.answer(200, [*headers, JSON], body)
        except _FailedError as error:
            raise self._shaped(call, error.choice) from None
        finally:
            attempt.cancel()

    def _writers(self, call: Call, choices: list[Choice], responder: Responder) -> list[ChoiceWriter]:
        tokenizer = self._replica.tokenizer
        return [ChoiceWriter(call, choice, responder, tokenizer, index) for index, choice in enumerate(choices)]

    def _shaped(self, call: Call, choice: Choice) -> ApiError:
        """A sequence that ended without an answer, as the client sees it."""
        if choice.finish is FinishReason.ABORT:
            return unavailable("the replica is shutting down", code="aborted", retry_after_s=1.0)
        if choice.error_code in NOT_NOW:
            return unavailable(choice.error, code=choice.error_code, retry_after_s=1.0)
        if choice.error_code is not None:
            return invalid(choice.error, call.own_name(choice.error_param), choice.error_code)
        if self._replica.state is ReplicaState.READY:
            return ApiError(500, f"the engine failed on this request: {choice.error}", code="engine_error")
        return unavailable(choice.error, code="engine_unavailable", retry_after_s=self._replica.core.retry_after_s())


class _FailedError(Exception):
    """A sequence ended without an answer."""

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice.error)
        self.choice = choice


async def _next(exchange: Exchange, attempt: Attempt) -> None:
    """Wait until there is something to read. Raises ClientGoneError when nobody is left to read it."""
    await attempt.changed.wait()
    attempt.changed.clear()
    if exchange.gone:
        raise ClientGoneError


async def _finished(exchange: Exchange, attempt: Attempt) -> None:
    """Wait for all text there will be."""
    while not attempt.finished:
        await _next(exchange, attempt)
        if attempt.failure is not None:
            raise _FailedError(attempt.failure)


def _chosen(call: Call, attempt: Attempt) -> list[Choice]:
    """The choices to be answered: of each prompt's samples the `n` likeliest per token, the best first."""
    if call.samples == call.n:
        return attempt.choices
    chosen: list[Choice] = []
    for start in range(0, len(attempt.choices), call.samples):
        samples = attempt.choices[start : start + call.samples]
        chosen += sorted(samples, key=lambda choice: choice.mean_logprob, reverse=True)[: call.n]
    return chosen


@dataclass(slots=True)
class _Stream:
    """The events of one streamed answer, in order."""

    exchange: Exchange
    attempt: Attempt
    responder: Responder
    headers: Headers
    writers: list[ChoiceWriter]

    async def run(self, *, with_usage: bool) -> None:
        events = b""
        while not all(writer.closed for writer in self.writers):
            if events:
                await self._send(events)
            await _next(self.exchange, self.attempt)
            # Whatever came while the last piece was being taken goes out as one piece.
            events = b"".join(writer.events() for writer in self.writers)
            if self.attempt.failure is not None:
                if events and self.exchange.started:
                    await self._send(events)
                raise _FailedError(self.attempt.failure)
        figures = self.responder.usage(_usage(self.attempt)) if with_usage else b""
        await self._send(events + figures + DONE, last=True)

    async def _send(self, events: bytes, *, last: bool = False) -> None:
        if not self.exchange.started:
            await self.exchange.start(200, [*self.headers, EVENT_STREAM, ("cache-control", "no-cache")])
        await self.exchange.write(events, last=last)


def _usage(attempt: Attempt) -> dict[str, Any]:
    return usage(attempt.prompt_tokens, attempt.output_tokens, attempt.cached_tokens)


async def _fail(exchange: Exchange, error: ApiError, headers: Headers) -> None:
    """Tell the client: by status while that is still possible, by an event in a started stream."""
    with contextlib.suppress(ClientGoneError):
        if exchange.started:
            await exchange.write(error_event(error), last=True)
        else:
            await exchange.answer(error.status, [*headers, *error.headers()], error.body())
