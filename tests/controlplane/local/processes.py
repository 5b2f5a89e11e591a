"""Looking at processes from outside, for tests that kill some and count what is left."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Look again until `condition` holds; False after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def is_alive(pid: int) -> bool:
    """True while `pid` runs; a zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def carrying(text: str) -> dict[int, str]:
    """Living processes with `text` in their arguments or environment, ourselves excepted."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                arguments = (entry / "cmdline").read_bytes()
                if text.encode() in arguments + (entry / "environ").read_bytes() and is_alive(int(entry.name)):
                    found[int(entry.name)] = arguments.replace(b"\0", b" ").decode(errors="replace")
    return found


@contextlib.contextmanager
def python(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process running `code`, killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def read_line(process: subprocess.Popen[str], seconds: float = 30.0) -> str:
    """The next line `process` prints."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    assert ready, "the process printed nothing"
    return process.stdout.readline().strip()
