"""wrk's script, its figures, and what is said where it is missing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from controlplane.lab.bench import wrk
from controlplane.lab.bench.closed import LoadError
from controlplane.lab.bench.requests import Target, body
from controlplane.local.errors import ExitCode, LocalError
from tests.controlplane.lab.bench.conftest import FakeEngine

SAID = (
    "Running 2s test @ http://127.0.0.1:1\n  1 threads and 16 connections\n  2191 requests in 2.00s, 1.20MB read\n"
    'tidegate-bench {"requests":2191,"duration_us":2004012,"bytes":1260000,"connect":0,"read":1,"write":0,"status":7,'
    '"timeout":2,"p50_us":13252,"p99_us":119970}\n'
)


def test_the_figures_are_read() -> None:
    run = wrk.read(SAID)
    assert run.requests_per_s == pytest.approx(2191 / 2.004012)
    assert (run.failures, run.status, run.p50_us, run.p99_us) == (3, 7, 13252, 119970)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("unable to connect to 127.0.0.1:1 Connection refused\n", "Connection refused"),
        ("", "nothing"),
        (SAID.replace('"requests":2191', '"requests":0'), "no answer"),
        (SAID.replace('"status":7', '"status":"7"'), "cannot be read"),
    ],
)
def test_what_wrk_could_not_do_is_said(said: str, why: str) -> None:
    with pytest.raises(LoadError, match=why):
        wrk.read(said)


def test_the_script_carries_any_text_as_it_is(tmp_path: Path) -> None:
    target = Target("t", 1, 'a"b\\c\n', "m", (("x-ü", "v"),))
    script = wrk.render(target, tmp_path / "body")
    assert r'wrk.headers["authorization"] = "Bearer a\034b\092c\010"' in script
    assert r'wrk.headers["x-\195\188"] = "v"' in script
    assert 'wrk.headers["host"]' not in script


def test_a_missing_wrk_is_one_sentence_with_an_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LocalError, match="apt-get install wrk") as caught:
        wrk.find(install=True, tell=lambda _: None)
    assert caught.value.code is ExitCode.MISSING


@pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed")
def test_wrk_loads_the_fake_engine(engine: FakeEngine) -> None:
    path = wrk.find(install=False, tell=lambda _: None)
    run = wrk.run(path, engine.target, body(engine.target, tokens=4), connections=4, seconds=1)
    assert run.requests > 100
    assert (run.failures, run.status) == (0, 0)
    assert 0 < run.p50_us <= run.p99_us
    assert wrk.version(path) != "unknown"
    refused = wrk.run(path, engine.target, b"no json", connections=1, seconds=1)
    assert refused.status == refused.requests
