"""`tidegate engine`: run a replica, or try the engine alone.

Layer: service. Reads flags and environment, says what is wrong in one sentence and exits: 2 for what was asked,
1 for what went wrong. Heavy modules are imported when a command runs.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import re
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from dataplane.scheduling.config import Batching, Capacity, Preemption, QueueOrder, SchedulerConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dataplane.replica_config import ReplicaConfig

EXIT_FAILED = 1
EXIT_USAGE = 2
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""A replica's id is also its folder's name."""
_TRUE = ("1", "true", "yes", "on")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def engine() -> None:
    """Run or try the engine alone."""


def _engine_options(command: Any) -> Any:
    """Options that shape the engine core; unset ones are chosen by the engine."""
    for option in (
        click.option(
            "--steps-in-flight", type=click.IntRange(1, 2), help="2 plans the next step while one runs.  [default: 1]"
        ),
        click.option(
            "--host-blocks",
            type=click.IntRange(0),
            help="KV blocks of host memory for swapped requests and evicted prefixes.  [default: 0]",
        ),
        click.option(
            "--tenant-weight",
            "tenant_weights",
            multiple=True,
            callback=_weights,
            metavar="TENANT=WEIGHT",
            help="A tenant's share of service, 1 where it is not given; once for each (--order vtc).",
        ),
        *(
            _number(f"--{name.replace('_', '-')}", help_text)
            for name, help_text in (
                ("output_charge", "What a generated token counts for (--order vtc)"),
                ("cached_charge", "What a prompt token found in the prefix cache counts for (--order vtc)"),
                ("input_charge", "What a prompt token that is computed counts for (--order vtc)"),
            )
        ),
        _number("--bucket-ageing", "Wait after which the queue's head says which bucket is next (selective)", "_s"),
        _number("--batch-window", "How long a dynamic batch waits for more requests", "_s"),
        click.option(
            "--batch-size", type=click.IntRange(0), help="Requests in a static or dynamic batch.  [default: all seats]"
        ),
        _choice("--preemption", Preemption, "How a request whose blocks were taken comes back"),
        _choice("--order", QueueOrder, "Who waits at the head, within one priority"),
        _choice("--capacity", Capacity, "Blocks an admission takes: what it needs now, or may ever need"),
        _choice("--batching", Batching, "When waiting requests join those that run"),
        click.option(
            "--long-prefill-threshold", type=click.IntRange(0), help="Most prompt tokens of one request in one step."
        ),
        click.option(
            "--watermark",
            type=click.FloatRange(0.0, 1.0, max_open=True),
            help="Share of the blocks an admission leaves free.  [default: 0.01]",
        ),
        click.option("--max-model-len", type=click.IntRange(2), help="Longest prompt and answer together, in tokens."),
        click.option("--num-blocks", type=click.IntRange(2), help="KV blocks in the pool."),
        click.option("--block-size", type=click.IntRange(1), help="Tokens per KV block."),
        click.option("--max-num-seqs", type=click.IntRange(1), help="Most sequences in one step."),
        click.option("--max-num-batched-tokens", type=click.IntRange(1), help="Token budget of one step."),
        click.option("--threads", type=click.IntRange(1), help="CPU threads of the engine core."),
        click.option(
            "--weights",
            type=click.Choice(["auto", "float32", "blocks", "int8", "int4"]),
            help="Numbers that matrices are kept in: a quantised GGUF's own blocks, or what is made on load.  "
            "[default: auto, the blocks of a quantised file unless run by torch, or else float32]",
        ),
        click.option(
            "--forward",
            type=click.Choice(["auto", "eager", "captured"]),
            help="How a step is run: by torch, or recorded and run by kernels compiled for this machine.  "
            "[default: auto, captured where a compiler is found, or else eager]",
        ),
    ):
        command = option(command)
    return command


def _choice(flag: str, kind: type[Batching | Capacity | Preemption | QueueOrder], what: str) -> Any:
    """An option that takes one of the names in `kind`."""
    names = [str(member) for member in kind]
    default = getattr(SchedulerConfig(), flag.removeprefix("--"))
    return click.option(flag, type=click.Choice(names), help=f"{what}.  [default: {default}]")


def _a_number(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """NaN is in every range that click checks."""
    if value is not None and math.isnan(value):
        raise click.BadParameter("nan is not a number.", context, parameter)
    return value


def _number(flag: str, what: str, unit: str = "") -> Any:
    """An option for a scheduler's field that is a number from 0 on; `unit` ends the field's name."""
    field = flag.removeprefix("--").replace("-", "_") + unit
    default = getattr(SchedulerConfig(), field)
    shown = f"{default:g} s" if unit else f"{default:g}"
    return click.option(
        flag, field, type=click.FloatRange(0.0), callback=_a_number, help=f"{what}.  [default: {shown}]"
    )


def _weights(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, float] | None:
    """`TENANT=WEIGHT` pairs as a table; None where none is given."""
    weights: dict[str, float] = {}
    for value in values:
        tenant, _, number = value.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not tenant or not 0 < weight < math.inf:
            raise click.BadParameter(f"{value!r} is not TENANT=WEIGHT with a positive weight.", context, parameter)
        if tenant in weights:
            raise click.BadParameter(f"{tenant!r} has two weights.", context, parameter)
        weights[tenant] = weight
    return weights or None


@engine.command()
@click.option("--replica", default="replica-0", show_default=True, help="This replica's id.")
@click.option("--pool", default="smollm2", show_default=True, help="The pool it belongs to.")
@click.option("--model", default="smollm2", show_default=True, help="Packaged name, GGUF file or model folder.")
@click.option("--served-model", help="Model name clients ask for.  [default: the model's own name]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=7310, show_default=True, type=click.IntRange(0, 65535), help="Port; 0 picks one.")
@click.option("--advertise-url", help="Address gateways reach this replica at.  [default: http://HOST:PORT]")
@click.option("--control-url", default="", help="Control plane to report to; none keeps everything here.")
@click.option(
    "--home",
    default=Path(".tidegate"),
    show_default=True,
    envvar="TIDEGATE_HOME",
    type=click.Path(path_type=Path),
    help="Folder for files.",
)
@click.option(
    "--drain-seconds", default=5.0, show_default=True, type=click.FloatRange(0.0), help="Grace for running requests."
)
@click.option(
    "--core-stall-seconds",
    default=60.0,
    show_default=True,
    type=click.FloatRange(1.0, 86_400.0),
    callback=_a_number,
    help="Silence after which the engine core counts as hung and is started again; half of it stops new requests.",
)
@click.option("--check-when-idle", is_flag=True, help="Verify the block accounting whenever the engine is idle.")
@click.option("--log-level", default="INFO", show_default=True, envvar="TIDEGATE_LOG_LEVEL", help="Logging level.")
@_engine_options
def serve(
    *,
    replica: str,
    pool: str,
    model: str,
    served_model: str | None,
    host: str,
    port: int,
    advertise_url: str | None,
    control_url: str,
    home: Path,
    drain_seconds: float,
    core_stall_seconds: float,
    check_when_idle: bool,
    log_level: str,
    **options: Any,
) -> None:
    """Serve one model over HTTP.

    TIDEGATE_INTERNAL_TOKEN is the bearer token callers must show and the control plane is shown.
    TIDEGATE_METRICS_TOKEN or TIDEGATE_METRICS_OPEN=1 say who may read /metrics.
    """
    if not _NAME.fullmatch(replica):
        _refuse(f"{replica!r} cannot name a replica: letters, digits, dots, dashes and underscores, at most 63")
    logging.basicConfig(level=_level(log_level), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    from dataplane.config import ConfigError, EngineConfig
    from dataplane.core_client import CoreSpec
    from dataplane.ports import free_port
    from dataplane.replica_config import ReplicaConfig

    token = os.environ.get("TIDEGATE_INTERNAL_TOKEN", "")
    if not token:
        _refuse("TIDEGATE_INTERNAL_TOKEN is not set; callers of this replica must show it as their bearer token")
    overrides: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    try:
        resolved = EngineConfig.resolve(model, **overrides)
    except ConfigError as error:
        _refuse(str(error))
    try:
        port = free_port(host, port)
    except OSError as error:
        _refuse(f"cannot listen on {host}:{port}: {error.strerror or error}", EXIT_FAILED)
    config = ReplicaConfig(
        replica=replica,
        pool=pool,
        served_model=served_model or resolved.model.name,
        model_path=resolved.model.path,
        host=host,
        port=port,
        advertise_url=advertise_url or f"http://{f'[{host}]' if ':' in host else host}:{port}",
        home=home.absolute(),
        core=CoreSpec(model=model, options=overrides, check_when_idle=check_when_idle, stall_s=core_stall_seconds),
        internal_token=token,
        control_url=control_url,
        metrics_token=os.environ.get("TIDEGATE_METRICS_TOKEN", ""),
        metrics_open=os.environ.get("TIDEGATE_METRICS_OPEN", "").lower() in _TRUE,
        drain_s=drain_seconds,
    )
    try:
        with _sole_owner(config.folder):
            sys.exit(_serve(config))
    except ConfigError as error:
        _refuse(str(error))
    except OSError as error:
        _refuse(f"cannot use the folder {config.folder}: {error.strerror or error}", EXIT_FAILED)


@engine.command()
@click.argument("prompt")
@click.option("--model", default="smollm2", show_default=True, help="Packaged name, GGUF file or model folder.")
@click.option("--max-tokens", default=128, show_default=True, type=click.IntRange(1), help="Longest answer.")
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(0.0, 2.0), help="0 is greedy.")
@click.option("--seed", type=int, help="Makes sampling repeatable.")
@click.option("--raw", is_flag=True, help="Continue the text as it is, without the chat template.")
@_engine_options
def generate(
    *,
    prompt: str,
    model: str,
    max_tokens: int,
    temperature: float,
    seed: int | None,
    raw: bool,
    **options: Any,
) -> None:
    """Answer PROMPT with the engine alone, without a server."""
    from dataplane.config import ConfigError
    from dataplane.llm import LLM
    from dataplane.protocol import SamplingParams
    from dataplane.request import RequestError

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    try:
        llm = LLM(model, **{name: value for name, value in options.items() if value is not None})
        if raw:
            completion = llm.generate([prompt], params)[0]
        else:
            completion = llm.chat([[{"role": "user", "content": prompt}]], params)[0]
    except ConfigError as error:
        _refuse(str(error))
    except RequestError as error:
        _refuse(error.message)
    click.echo(completion.text)


def _serve(config: ReplicaConfig) -> int:
    """Run the replica on its own event loop; the process's exit code."""
    import uvloop

    from dataplane.replica import Replica
    from dataplane.server import ReplicaServer
    from dataplane.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(config.model_path)

    async def run() -> int:
        replica = Replica(config, tokenizer)
        logging.getLogger(__name__).info("replica %s listens on %s", config.replica, config.advertise_url)
        if await ReplicaServer(replica).run():
            return 0
        click.echo(f"Error: {replica.reason}", err=True)
        return EXIT_FAILED

    return uvloop.run(run())


@contextmanager
def _sole_owner(folder: Path) -> Iterator[None]:
    """Two replicas with one id would spoil each other's journal: the second is refused."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _refuse(f"another replica named {folder.name} is running with the folder {folder}", EXIT_FAILED)
        yield


def _level(name: str) -> int:
    level = logging.getLevelNamesMapping().get(name.upper())
    if level is None:
        _refuse(f"{name!r} is not a log level")
    return level


def _refuse(sentence: str, code: int = EXIT_USAGE) -> NoReturn:
    click.echo(f"Error: {sentence}", err=True)
    sys.exit(code)
