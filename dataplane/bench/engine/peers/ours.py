"""The engine as `tidegate engine serve` starts it.

Layer: service. It knows the engine by its command line: a flag that this build's engine does not have is refused.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

from dataplane.bench.engine.client import Endpoint
from dataplane.bench.engine.peers.setting import HOST, Setting
from dataplane.bench.engine.server import Launch
from dataplane.bench.errors import BenchError
from dataplane.cli import serve

RUN = "from dataplane.cli import engine; engine()"


def flags_of(named: Mapping[str, str | None], more: Sequence[str]) -> tuple[str, ...]:
    """`named` options, those that are set, and `more` flags as they are.

    Raises BenchError for one that the engine's command line does not have.
    """
    flags = [f"{name}={value}" for name, value in named.items() if value is not None] + list(more)
    known = {option for parameter in serve.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for flag in flags:
        name = flag.partition("=")[0]
        if name.startswith("-") and name not in known:
            raise BenchError(f"`tidegate engine serve` has no {name} in this build")
    return tuple(flags)


def prepare(setting: Setting, flags: Sequence[str], name: str = "tidegate") -> Launch:
    """Ours, in a home of its own, so that two of them can run."""
    port, url = setting.address()
    token = secrets.token_hex(16)
    home = setting.folder / f"{name}-home"
    arguments = ["--model", str(setting.model), "--served-model", "bench", "--host", HOST, "--port", str(port)]
    arguments += ["--home", str(home), "--log-level", "WARNING", "--threads", str(setting.threads)]
    arguments += ["--max-model-len", str(setting.longest), *flags]
    return Launch(
        endpoint=Endpoint(
            name, url, "bench", token, extra={"ignore_eos": True, "stream_options": {"include_usage": True}}
        ),
        command=(sys.executable, "-c", RUN, "serve", *arguments),
        version=_version(),
        setup={"dtype": _dtype(flags), "flags": " ".join(flags) or "defaults"},
        environment={"TIDEGATE_INTERNAL_TOKEN": token, "PYTHONPATH": ":".join(part for part in sys.path if part)},
        health="/healthz",
    )


def _dtype(flags: Sequence[str]) -> str:
    """Activations and KV are float32; of the weights the flag says."""
    given = [flag.partition("=")[2] for flag in flags if flag.startswith("--weights=")]
    return f"float32, weights {given[-1]}" if given else "float32, weights as the engine chooses"


def _version() -> str:
    try:
        return version("tidegate")
    except PackageNotFoundError:
        return "from source"
