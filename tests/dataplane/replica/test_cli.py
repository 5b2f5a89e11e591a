"""`tidegate engine`: what is wrong is one sentence and an exit code, never a traceback."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.dataplane.replica.harness import client_of, command, environment, listening, replica_process
from tests.dataplane.replica.real import PARIS


def run(*arguments: str, token: str | None = "token", cwd: Path | None = None) -> tuple[int, str]:
    """Exit code and what was printed to stderr."""
    variables = environment()
    if token is None:
        del variables["TIDEGATE_INTERNAL_TOKEN"]
    done = subprocess.run(
        command("engine", *arguments), env=variables, capture_output=True, text=True, timeout=200, cwd=cwd, check=False
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("flags", "code", "sentence"),
    [
        (["--model", "/nowhere/model.gguf"], 2, "there is no model at /nowhere/model.gguf"),
        (["--max-model-len", "9000"], 2, "max_model_len must be between"),
        (["--port", "99999"], 2, "99999"),
        (["--log-level", "shouting"], 2, "log level"),
        (["--host", "203.0.113.7"], 1, "cannot listen on 203.0.113.7"),
        (["--replica", "a/../../b"], 2, "replica"),
        (["--batching", "lucky"], 2, "'continuous', 'static', 'dynamic', 'selective'"),
        (["--steps-in-flight", "3"], 2, "--steps-in-flight"),
        (["--core-stall-seconds", "0.5"], 2, "--core-stall-seconds"),
        (["--core-stall-seconds", "nan"], 2, "nan is not a number"),
        (["--tenant-weight", "acme=0"], 2, "'acme=0' is not TENANT=WEIGHT with a positive weight"),
        (["--tenant-weight", "acme"], 2, "'acme' is not TENANT=WEIGHT"),
        (["--tenant-weight", "a=1", "--tenant-weight", "a=2"], 2, "'a' has two weights"),
        (["--batch-window", "nan"], 2, "nan is not a number"),
        (["--bucket-ageing", "inf"], 2, "bucket_ageing_s must be finite"),
        (["--output-charge", "-1"], 2, "--output-charge"),
    ],
)
def test_serve_refuses_in_one_sentence(tmp_path: Path, flags: list[str], code: int, sentence: str) -> None:
    status, text = run("serve", "--home", str(tmp_path), "--port", "0", *flags)
    assert status == code
    assert sentence in text


def test_a_missing_token_is_named(tmp_path: Path) -> None:
    status, text = run("serve", "--home", str(tmp_path), token=None)
    assert status == 2
    assert "TIDEGATE_INTERNAL_TOKEN" in text


def test_a_port_in_use_is_one_sentence(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, text = run("serve", "--home", str(tmp_path), "--port", str(port))
    assert status == 1
    assert f"cannot listen on 127.0.0.1:{port}" in text
    assert text.count("\n") == 1


def test_a_home_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    status, text = run("serve", "--home", str(tmp_path / "file"), "--port", "0")
    assert status == 1
    assert "cannot use the folder" in text


def test_a_broken_model_file_is_one_sentence(tmp_path: Path) -> None:
    model = tmp_path / "broken.gguf"
    model.write_bytes(b"GGUF but not really")
    status, text = run("serve", "--home", str(tmp_path), "--port", "0", "--model", str(model))
    assert status == 2
    assert "broken.gguf" in text


async def _until_listening(url: str) -> None:
    async with client_of(url) as client:
        await listening(client)


def test_a_second_replica_with_the_same_name_is_refused(tmp_path: Path) -> None:
    """Its port is another, so only the name says that the journal is taken; granian would even share the port."""
    with replica_process(tmp_path) as first:
        asyncio.run(_until_listening(first.url))
        status, text = run("serve", "--home", str(tmp_path), "--port", "0")
        assert status == 1
        assert "another replica named replica-0 is running" in text
        assert first.stop(signal.SIGINT) == 0, "Ctrl-C while the model loads is an orderly end"


def test_generate_prints_an_answer() -> None:
    arguments = command(
        "engine",
        "generate",
        PARIS,
        "--max-tokens",
        "12",
        "--threads",
        "1",
    )
    done = subprocess.run(arguments, env=environment(), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "The capital of France is Paris."


def test_generate_refuses_a_missing_model_in_one_sentence() -> None:
    status, text = run("generate", "hi", "--model", "/nowhere")
    assert status == 2
    assert "there is no model at /nowhere" in text
