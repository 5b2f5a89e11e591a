"""wrk, a load generator in C: found or installed, run, its figures read.

Layer: service. It measures throughput with the least work on the load's core. wrk is closed-loop: for latency under a
given rate see `openloop`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from controlplane.lab.bench.closed import LoadError
from controlplane.lab.bench.requests import Target, headers
from controlplane.local.errors import ExitCode, LocalError

INSTALL_S = 180.0
MARK = "tidegate-bench "
MISSING = "wrk, the load generator, is not installed; on Debian or Ubuntu: apt-get install wrk"

SCRIPT = """
wrk.method = "POST"
wrk.path = {path}
wrk.body = io.open({body_file}, "rb"):read("*a")
{headers}
done = function(summary, latency, requests)
  io.write(string.format(
    '{mark}{{"requests":%d,"duration_us":%d,"bytes":%d,"connect":%d,"read":%d,"write":%d,"status":%d,"timeout":%d,' ..
    '"p50_us":%d,"p99_us":%d}}\\n',
    summary.requests, summary.duration, summary.bytes, summary.errors.connect, summary.errors.read,
    summary.errors.write, summary.errors.status, summary.errors.timeout,
    latency:percentile(50), latency:percentile(99)))
end
"""


class WrkRun(msgspec.Struct, frozen=True):
    """One run: `connect` to `timeout` count what went wrong; `status` answers that were no 2xx or 3xx."""

    requests: int
    duration_us: int
    bytes: int
    connect: int
    read: int
    write: int
    status: int
    timeout: int
    p50_us: int
    p99_us: int

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.duration_us * 1e6

    @property
    def failures(self) -> int:
        """Requests without an answer."""
        return self.connect + self.read + self.write + self.timeout


def find(*, install: bool, tell: Callable[[str], None]) -> str:
    """wrk's path. With `install`, root gets it from apt. Raises LocalError with what to do."""
    found = shutil.which("wrk")
    if found is None and install and os.geteuid() == 0 and shutil.which("apt-get"):
        tell("installing wrk with apt-get")
        _apt("update")
        _apt("install", "-y", "--no-install-recommends", "wrk")
        found = shutil.which("wrk")
    if found is None:
        raise LocalError(MISSING, ExitCode.MISSING)
    return found


def version(path: str) -> str:
    """What it calls itself."""
    said = subprocess.run([path, "-v"], capture_output=True, text=True, check=False)  # noqa: S603 - found above
    found = re.search(r"wrk (\S+)", said.stdout + said.stderr)
    return found[1] if found else "unknown"


def run(path: str, target: Target, content: bytes, *, connections: int, seconds: float) -> WrkRun:
    """Load `target` for about `seconds` (wrk counts whole ones). Raises LoadError."""
    with tempfile.TemporaryDirectory(prefix="tidegate-wrk-") as folder:
        body_file, script = Path(folder, "body"), Path(folder, "post.lua")
        body_file.write_bytes(content)
        script.write_text(render(target, body_file))
        command = [path, "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--timeout", "30s", "-s"]
        command += [str(script), f"http://127.0.0.1:{target.port}"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # noqa: S603
        try:
            said, _ = process.communicate(timeout=seconds + 60)
        except subprocess.TimeoutExpired:
            raise LoadError(f"wrk did not end {seconds + 60:.0f} s after its start") from None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    return read(said)


def render(target: Target, body_file: Path) -> str:
    """The Lua script: the request, and the figures as one line of JSON."""
    lines = (f"wrk.headers[{_lua(name)}] = {_lua(value)}" for name, value in headers(target).items() if name != "host")
    return SCRIPT.format(path=_lua(target.path), body_file=_lua(str(body_file)), headers="\n".join(lines), mark=MARK)


def read(said: str) -> WrkRun:
    """The figures in what wrk printed. Raises LoadError."""
    for line in said.splitlines():
        if line.startswith(MARK):
            try:
                found = msgspec.json.decode(line.removeprefix(MARK), type=WrkRun)
            except msgspec.DecodeError as error:
                raise LoadError(f"wrk's figures cannot be read: {error}") from None
            if not found.requests:
                raise LoadError("wrk got no answer at all")
            return found
    last = said.strip().splitlines()[-1:] or ["nothing"]
    raise LoadError(f"wrk printed no figures; its last word: {last[0][:200]}")


def _lua(text: str) -> str:
    """`text` as a Lua string: every byte that is not plain is a decimal escape."""
    plain = "".join(chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:03d}" for byte in text.encode())
    return f'"{plain}"'


def _apt(*arguments: str) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        subprocess.run(  # noqa: S603 - fixed arguments
            ["apt-get", "-qq", *arguments],  # noqa: S607 - wherever the system has it
            env=environment,
            capture_output=True,
            timeout=INSTALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return
