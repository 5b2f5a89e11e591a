"""The bench end to end: the whole deployment, a short measurement of each kind, and nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from controlplane.cli import main
from controlplane.lab.bench import deployment, plain_relay
from tests.controlplane.local.processes import carrying, wait_until

KEYS = {
    "added_ms_p50_c1",
    "added_ms_p99_c1",
    "added_ms_p50_open300",
    "added_ms_p99_open300",
    "requests_per_s_c16",
    "requests_per_s_c64",
    "relay_tokens_per_s_16",
    "relay_tokens_per_s_64",
    "refusal_ms_p99",
    "refusals_per_s",
    "rss_growth_mb",
    "added_ttft_ms_p50",
    "cpu_ms_per_request_c16",
    "cpu_us_per_token_16",
}
PLAIN_KEYS = {
    *(f"plain_added_ms_{quantile}_{kind}" for quantile in ("p50", "p99") for kind in ("c1", "open300")),
    *(f"plain_added_ratio_{quantile}_{kind}" for quantile in ("p50", "p99") for kind in ("c1", "open300")),
    *(f"plain_{what}_c{count}" for what in ("requests_per_s", "cpu_ms_per_request") for count in (16, 64)),
    *(f"plain_{what}_ratio_c{count}" for what in ("requests", "cpu") for count in (16, 64)),
    "plain_relay_tokens_per_s_16",
    "plain_relay_single_tokens_per_s_16",
    "plain_cpu_us_per_token_16",
    "plain_tokens_ratio_16",
    "plain_single_tokens_ratio_16",
}

needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the bench needs two cores")
needs_wrk = pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed")


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "controlplane", "bench", "gateway", *arguments]
    environment = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def nothing_left(folder: Path) -> bool:
    return not carrying(str(folder)) and list(folder.glob("tidegate-*")) == []


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for temporary files that the stores' own user may pass through."""
    made = tmp_path_factory.mktemp("bench")
    for each in (made, made.parent, made.parent.parent):
        each.chmod(0o711)
    return made


@pytest.mark.slow
@needs_two_cores
@needs_wrk
def test_a_quick_run_measures_everything_and_leaves_nothing(folder: Path) -> None:
    path = folder / "out.json"
    process = start(folder, "--quick", "--seed", "7", "--json", str(path))
    said, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    document = json.loads(path.read_text())
    results = document["results"]
    assert set(results) >= KEYS | PLAIN_KEYS
    for count in (16, 64):
        ours, plain = results[f"requests_per_s_c{count}"], results[f"plain_requests_per_s_c{count}"]
        assert results[f"plain_requests_ratio_c{count}"] == pytest.approx(ours / plain)
        assert results[f"plain_cpu_ms_per_request_c{count}"] > 0, "the relay's processes were not the measured ones"
    assert document["seed"] == document["case"]["seed"] == 7
    assert {"cpu", "cores", "load"} <= set(document["machine"])
    assert "wrk" in document["versions"]
    # The controls: the direct path adds nothing to itself, a late engine shows how late it is.
    assert abs(results["control_ms_p50_c1"]) < results["added_ms_p50_c1"]
    assert 4 < results["late_engine_ms_p50"] < 50
    assert results["added_ms_p50_c1"] > 0
    assert results["requests_per_s_c16"] < results["ceiling_requests_per_s_c16"]
    assert results["refusals_per_s"] > results["served_per_s"]
    for title in (
        "Latency",
        "Requests, not streamed",
        "Tokens, streamed",
        "Refusals at 5× overload",
        "Resident memory",
    ):
        assert title in said
    assert said.count("plain relay") >= len(("c1", "open300", "c16", "c64", "unpaced", "single"))
    assert wait_until(lambda: nothing_left(folder)), carrying(str(folder))


@pytest.mark.slow
@needs_two_cores
@needs_wrk
def test_ctrl_c_stops_everything_it_started(folder: Path) -> None:
    process = start(folder)
    assert process.stderr is not None
    assert any("one request at a time" in line for line in process.stderr), "it did not come to measure"
    assert any(plain_relay.__name__ in command for command in carrying(str(folder)).values())
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert wait_until(lambda: nothing_left(folder)), carrying(str(folder))


def test_the_deployment_is_its_own_whatever_the_environment_names() -> None:
    given = {
        "PATH": "/bin",
        "DATABASE_URL": "postgresql://elsewhere/db",
        "REDIS_URL": "redis://elsewhere",
        "TIDEGATE_CONTROL_URL": "http://elsewhere",
        "TIDEGATE_MAX_IN_FLIGHT": "7",
    }
    assert deployment.environment(given) == {
        "PATH": "/bin",
        "TIDEGATE_MAX_IN_FLIGHT": str(deployment.MAX_IN_FLIGHT),
        "TIDEGATE_LEASE_DEADLINE_MS": str(deployment.LEASE_DEADLINE_MS),
        "TIDEGATE_CANARY_GATEWAYS": deployment.NO_GATEWAY,
    }


def test_bench_lists_the_dataplanes_benches_and_the_gateways() -> None:
    listed = CliRunner().invoke(main, ["bench", "--help"]).output
    assert all(name in listed for name in ("gateway", "grammar", "roofline", "scheduler"))
    shown = CliRunner().invoke(main, ["bench", "scheduler", "--help"])
    assert (shown.exit_code, "--trace" in shown.output) == (0, True)


def test_bad_flags_are_refused() -> None:
    for arguments in (["--only", "nothing"], ["--only", "against"], ["--against", "nobody"], ["--seed", "x"]):
        assert CliRunner().invoke(main, ["bench", "gateway", *arguments]).exit_code == 2


def test_without_wrk_it_says_so_before_anything_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = CliRunner().invoke(main, ["bench", "gateway"])
    assert done.exit_code == 10
    assert done.output.strip() == (
        "Error: wrk, the load generator, is not installed; on Debian or Ubuntu: apt-get install wrk"
    )
