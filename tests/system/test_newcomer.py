"""What a newcomer does: paste what was printed, run the check, and do it as an ordinary user too."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from tests.controlplane.local.processes import carrying
from tests.system.product import Product

CHECK = [sys.executable, "-m", "controlplane", "up", "--check"]
ORDINARY = ("nobody", "daemon", "postgres")


def paste(text: str) -> str:
    """What a shell answers to it."""
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_every_check_held(done: subprocess.CompletedProcess[str]) -> None:
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "Traceback" not in said
    assert "✗" not in said
    assert "every check held" in said
    assert re.search(r"the same prompt hits the KV cache +[1-9]\d* of \d+ prompt tokens", said), said


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_printed_curl_snippet_answers_when_pasted(product: Product) -> None:
    found = re.search(r"^curl -N .*?\n.*?\n  -d '.*?'$", product.output.read_text(), re.MULTILINE)
    assert found is not None
    answered = paste(found.group())
    assert answered.rstrip().endswith("data: [DONE]")
    assert '"content"' in answered


def test_the_printed_openai_snippet_answers_sensible_english_when_pasted(product: Product) -> None:
    found = re.search(r"^\S+ - <<'EOF'\n.*?^EOF$", product.output.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    assert "Paris" in paste(found.group())


def test_the_credentials_are_the_owners_only(product: Product) -> None:
    secret = [*product.home.glob("*.json"), *product.home.glob("*.secret"), *product.home.glob("*.password")]
    assert len(secret) >= 7
    assert [path.name for path in secret if path.stat().st_mode & 0o077] == []


def test_no_log_holds_a_secret(product: Product) -> None:
    """F33: keys, tokens and passwords are in no log of any process."""
    secrets = [product.demo_key, product.credentials["password"], product.credentials["api_token"]]
    secrets += [path.read_text().strip() for path in product.home.glob("*.secret")]
    secrets += [path.read_text().strip() for path in product.home.glob("*.password")]
    product.as_tenant("GET", "/v1/models")
    for log in [*product.home.glob("logs/*"), *product.home.glob("gateway/*/requests.jsonl*")]:
        text = log.read_text(errors="replace")
        assert not [secret for secret in secrets if secret in text], log.name


@pytest.mark.slow
def test_the_check_holds() -> None:
    done = subprocess.run(CHECK, capture_output=True, text=True, timeout=600, check=False)
    assert_every_check_held(done)
    assert not carrying("tidegate-check-")


@pytest.fixture
def ordinary() -> Iterator[tuple[list[str], dict[str, str]]]:
    """A prefix that runs a command as an ordinary user, and that user's environment."""
    if os.geteuid() != 0:
        pytest.skip("this run is an ordinary user's already")
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    account = next(pwd.getpwnam(name) for name in ORDINARY if name in {entry.pw_name for entry in pwd.getpwall()})
    prefix = ["setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups", "--"]
    with tempfile.TemporaryDirectory(prefix="tidegate-ordinary-") as folder:
        os.chown(folder, account.pw_uid, account.pw_gid)
        given = {"HOME": folder, "TMPDIR": folder, "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
        reach = subprocess.run(
            [*prefix, sys.executable, "-c", "import controlplane.local.stack, torch"],
            env=given,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if reach.returncode:
            said = (reach.stderr.strip().splitlines() or ["no message"])[-1]
            pytest.skip(f"{account.pw_name} cannot reach this Python or checkout: {said}")
        yield prefix, {**given, "PWD": folder}


@pytest.mark.slow
def test_the_check_holds_for_an_ordinary_user(ordinary: tuple[list[str], dict[str, str]]) -> None:
    prefix, environment = ordinary
    done = subprocess.run(
        [*prefix, *CHECK],
        env=environment,
        cwd=environment["HOME"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert_every_check_held(done)
