"""What the gateway reads of a request body and what it sends on."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.errors import InvalidRequestError
from controlplane.gateway.body import read_inference_body

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
others = st.dictionaries(
    st.text(max_size=8).filter(lambda k: k not in {"model", "stream", "stream_options"}), json_values, max_size=5
)
layouts = st.sampled_from([{}, {"separators": (",", ":")}, {"indent": 2}, {"ensure_ascii": False}])


@given(others, layouts)
def test_a_body_that_is_not_streamed_goes_on_byte_for_byte(rest: dict[str, object], layout: dict[str, object]) -> None:
    body = json.dumps({"model": "m", **rest}, **layout).encode()
    read = read_inference_body(body)
    assert (read.model, read.stream, read.hide_usage, read.forward) == ("m", False, False, body)


@given(others, layouts, st.sampled_from([None, {}, {"include_usage": False}, {"x": [1, {"y": "é"}]}, "absent"]))
def test_a_stream_asks_for_usage_and_changes_nothing_else(
    rest: dict[str, object], layout: dict[str, object], options: object
) -> None:
    sent: dict[str, object] = {"model": "m", "stream": True, **rest}
    if options != "absent":
        sent["stream_options"] = options
    read = read_inference_body(json.dumps(sent, **layout).encode())
    assert (read.stream, read.hide_usage) == (True, True)
    merged = {**(options if isinstance(options, dict) else {}), "include_usage": True}
    assert json.loads(read.forward) == {**sent, "stream_options": merged}


@given(others, layouts)
def test_a_stream_that_asks_for_usage_itself_goes_on_byte_for_byte(
    rest: dict[str, object], layout: dict[str, object]
) -> None:
    sent = {"stream_options": {"include_usage": True}, "model": "m", "stream": True, **rest}
    body = json.dumps(sent, **layout).encode()
    read = read_inference_body(body)
    assert (read.stream, read.hide_usage, read.forward) == (True, False, body)


@pytest.mark.parametrize("options", ["1", '"x"', "[]", '{"include_usage":"yes"}'])
def test_odd_stream_options_are_left_for_the_replica_to_judge(options: str) -> None:
    body = f'{{"model":"m","stream":true,"stream_options":{options}}}'.encode()
    read = read_inference_body(body)
    assert (read.forward, read.hide_usage) == (body, False)


def test_injection_leaves_every_other_byte_alone() -> None:
    body = b' {"model" : "m",\n"stream":true, "messages":[{"content":"}"}] } \n'
    expected = (
        b' {"model" : "m",\n"stream":true, "messages":[{"content":"}"}] ,"stream_options":{"include_usage":true}} \n'
    )
    assert read_inference_body(body).forward == expected


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "empty_body"),
        (b"  \n", "empty_body"),
        (b"{", "invalid_json"),
        (b'{"model": "m",}', "invalid_json"),
        (b'{"model": NaN}', "invalid_json"),
        (b"[1]", "invalid_json"),
        (b'"model"', "invalid_json"),
        (b"null", "invalid_json"),
        (b'{"model":"m"} x', "invalid_json"),
        (b'{"model":"m","x":"\xff"}', "invalid_json"),
        (b'{"model":"m","x":"\\ud800"}', "invalid_json"),
        (b'{"model":"m","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json"),
        (b"{}", "missing_model"),
        (b'{"model":""}', "missing_model"),
        (b'{"model":null}', "invalid_model"),
        (b'{"model":["m"]}', "invalid_model"),
        (b'{"model":7}', "invalid_model"),
    ],
)
def test_bodies_that_cannot_be_served_are_refused_with_one_sentence(body: bytes, code: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read_inference_body(body)
    assert refused.value.code == code
    assert refused.value.message.endswith((".", ")."))
    assert len(refused.value.message) < 200


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"allowed","model":"forbidden"}',
        b'{"model":"forbidden","model":"allowed"}',
        b'{"model":"allowed","\\u006dodel":"forbidden"}',
        b'{"model":"a",\n\n "messages": [{"model":"fine"}], "mod\\u0065l" : 0}',
        b'{"model":"a","stream":true,"stream":false}',
        b'{"model":"a","stream":false,"stream":true,"stream_options":{},"stream_options":{}}',
    ],
)
def test_a_body_that_two_parsers_could_read_differently_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read_inference_body(body)
    assert refused.value.code == "duplicate_key"


def test_the_same_key_inside_other_objects_is_no_duplicate() -> None:
    body = b'{"model":"m","a":{"model":1,"model":2},  \n\n\n          "b":[{"stream":0}]}'
    assert read_inference_body(body).model == "m"
