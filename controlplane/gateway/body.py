"""What the gateway reads of a request body, and the bytes it sends on.

Layer: service. The body is forwarded byte for byte; the one change is `stream_options.include_usage`, injected when a
stream's client did not ask for usage. Only `model`, `stream`, `stream_options` and what decides how large the request
is are read: everything else is the replica's to judge. This module must never let a body through that another parser
could read differently where access or a quota is decided: duplicates of those keys are refused.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from controlplane.errors import InvalidRequestError
from controlplane.gateway.size import SIZE_KEYS, Size, read_size

READ_KEYS = ("model", "stream", "stream_options", *SIZE_KEYS)
SHORTEST_DUPLICATE = len(b',"n":0')
"""A second one of the keys that are read takes at least this many bytes."""
SHORTEST_ESCAPED = len(b',"\\u006e":0')
"""The same for one that is written with an escape."""

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_STRING = msgspec.json.Decoder(str)
_OPTIONS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class InferenceBody(msgspec.Struct, frozen=True, gc=False):
    """`forward` is what the replica gets; `hide_usage` says that usage was injected and must not reach the client."""

    model: str
    stream: bool
    hide_usage: bool
    forward: bytes
    size: Size

    @property
    def size_params(self) -> tuple[str, str]:
        """What the client calls its prompt and its output limit."""
        return ("messages", "max_completion_tokens") if self.size.chat else ("prompt", "max_tokens")


def read_inference_body(body: bytes) -> InferenceBody:
    """Read a completion request. Raises InvalidRequestError (400) when it is no JSON object or names no model."""
    members = _members(body)
    _refuse_duplicates(body, members)
    model = _model(members.get("model"))
    size = read_size(members)
    stream = bytes(members.get("stream", b"")) == b"true"
    if not stream:
        return InferenceBody(model, False, False, body, size)
    options = members.get("stream_options")
    if options is None:
        closing = body.rindex(b"}")
        injected = body[:closing] + b',"stream_options":{"include_usage":true}' + body[closing:]
        return InferenceBody(model, True, True, injected, size)
    hidden, forward = _with_options(body, members, bytes(options))
    return InferenceBody(model, True, hidden, forward, size)


def _members(body: bytes) -> dict[str, msgspec.Raw]:
    if not body.strip():
        raise InvalidRequestError("The request body is empty; send a JSON object.", code="empty_body")
    try:
        if not body.isascii():
            body.decode()
        return _OBJECT.decode(body)
    except UnicodeDecodeError:
        raise InvalidRequestError("The request body is not valid UTF-8.", code="invalid_json") from None
    except msgspec.ValidationError:
        raise InvalidRequestError("The request body must be a JSON object.", code="invalid_json") from None
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"The request body is not valid JSON: {error}.", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequestError("The request body is nested too deeply.", code="invalid_json") from None


def _model(raw: msgspec.Raw | None) -> str:
    if raw is None:
        raise InvalidRequestError("You must provide a model parameter.", code="missing_model", param="model")
    try:
        model = _STRING.decode(raw)
    except msgspec.DecodeError:
        raise InvalidRequestError("The model must be a string.", code="invalid_model", param="model") from None
    if not model:
        raise InvalidRequestError("You must provide a model parameter.", code="missing_model", param="model")
    return model


def _refuse_duplicates(body: bytes, members: dict[str, msgspec.Raw]) -> None:
    """JSON lets a key appear twice and parsers disagree on which counts; such a body could name one model to the
    gateway and another to the replica.

    The members' own bytes are added up first: when what is left over cannot hold a second member, there is none.
    """
    accounted = 2 * len(members) + 1  # braces, colons and commas
    for key, value in members.items():
        accounted += len(key) + 2 + len(memoryview(value))
    spare = len(body) - accounted
    if spare < SHORTEST_DUPLICATE:
        return
    if spare < SHORTEST_ESCAPED and all(body.count(f'"{key}"'.encode()) < 2 for key in members if key in READ_KEYS):
        return
    top: list[tuple[str, Any]] = []

    def keep_last(pairs: list[tuple[str, Any]]) -> None:
        nonlocal top
        top = pairs

    try:
        json.loads(body, object_pairs_hook=keep_last)
    except (ValueError, RecursionError):
        raise InvalidRequestError("The request body is not valid JSON.", code="invalid_json") from None
    seen: set[str] = set()
    for key, _ in top:
        if key in seen and key in READ_KEYS:
            raise InvalidRequestError(f"The key {key!r} appears twice.", code="duplicate_key", param=key)
        seen.add(key)


def _with_options(body: bytes, members: dict[str, msgspec.Raw], options: bytes) -> tuple[bool, bytes]:
    """Whether usage is hidden, and the body: that of a stream whose client sent `stream_options` is unchanged when it
    asks for usage, else merged with the request for it.

    Values that are no object go on unchanged; the replica refuses them in its own words.
    """
    if options == b"null":
        merged: dict[str, Any] = {}
    else:
        try:
            merged = dict(_OPTIONS.decode(options))
        except msgspec.DecodeError:
            return False, body
    asked = bytes(merged.get("include_usage", b"false"))
    if asked == b"true":
        return False, body
    if asked not in {b"false", b"null"}:
        return False, body
    merged["include_usage"] = True
    forward = msgspec.json.encode({**members, "stream_options": merged})
    return True, forward
