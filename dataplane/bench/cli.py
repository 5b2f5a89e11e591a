"""`tidegate bench`: measure the engine and its policies.

Layer: service. Reads flags, says what is wrong in one sentence and exits with 2. A bench's module is imported when
its command runs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

import click

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_MISSING = 10
EXIT_INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Measure the engine and its policies, each beside a control that must show no gain."""


def json_option(command: click.decorators.FC) -> click.decorators.FC:
    """`--json PATH`, which every bench has."""
    return click.option(
        "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the results to a file too."
    )(command)


@bench.command()
@click.option(
    "--tables",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with the published H200 kernel tables (h200_*_perf.parquet); needs the extra `bench`.",
)
@click.option("--model", default="smollm2", show_default=True, help="Packaged name, GGUF file or model folder.")
@click.option("--prompt", default=1024, show_default=True, type=click.IntRange(64), help="Prompt tokens of a TTFT.")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1), help="Measurements of each.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads.  [default: the cores of this process]")
@click.option("--probe-seconds", default=2.0, show_default=True, type=click.FloatRange(0.05), help="For each ceiling.")
@click.option("--seed", default=0, show_default=True, type=int, help="Of the prompts and their order.")
@click.option("--no-engine", is_flag=True, help="Leave out the engine's TTFT, which takes minutes.")
@json_option
def roofline(
    *,
    tables: Path | None,
    model: str,
    prompt: int,
    repeats: int,
    threads: int | None,
    probe_seconds: float,
    seed: int,
    no_engine: bool,
    json_path: Path | None,
) -> None:
    """Compare the cost model with measurements.

    Against published H200 kernels (--tables), against operators of this CPU, and predicted TTFT at prefix hit ratios
    0, 0.3, 0.6 and 0.9 against the engine's own, with TPOT as the control that must not change.
    """
    from dataplane.bench.report import emit
    from dataplane.bench.roofline import RooflineCase, run
    from dataplane.errors import ConfigError
    from dataplane.hardware.device import cores

    case = RooflineCase(
        model=model,
        prompt=prompt,
        repeats=repeats,
        threads=threads or cores(),
        probe_seconds=probe_seconds,
        seed=seed,
        engine=not no_engine,
    )
    try:
        emit(run(case, tables), json_path)
    except ConfigError as error:
        refuse(str(error))


LOADS = ("w1", "w2", "w3_equal", "w3_mixed", "w4", "w5")
PEERS = ("transformers", "llama.cpp", "vllm", "self")
PEER_FORMATS = ("shipped", "f32", "f16", "q8_0", "q4_0", "q4_1")
ENGINE_EXITS = """
\b
Exit codes:
    0  measured
    1  a server failed while it was measured; another peer's figures stand
    2  a flag is wrong, or the result to compare with is of another case
   10  a peer cannot be had; the others were measured
  130  interrupted; everything that was started has been stopped
"""


@bench.command(epilog=ENGINE_EXITS)
@click.option("--model", default="smollm2", show_default=True, help="Packaged name, GGUF file or model folder.")
@click.option("--only", default="", metavar="LOADS", help=f"Some of {','.join(LOADS)}, by commas.  [default: all]")
@click.option(
    "--against",
    multiple=True,
    type=click.Choice(PEERS),
    help="Install this peer and take turns with it; may be given several times. `self` is the control: ratio 1.",
)
@click.option("--pairs", default=10, show_default=True, type=click.IntRange(1), help="Turns of each side.")
@click.option("--peer-format", type=click.Choice(PEER_FORMATS), help="Weights of llama.cpp.  [default: q4_0]")
@click.option("--forward", help="Handed to our engine: how it runs a step.")
@click.option("--weights", help="Handed to our engine: how it keeps its weights.")
@click.option("--ours-flag", "ours_flags", multiple=True, metavar="FLAG", help="Any flag of `tidegate engine serve`.")
@click.option(
    "--keep-env",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder that keeps what --against installs, for the next run.  [default: thrown away]",
)
@click.option(
    "--compare",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Earlier result to compare ours with; refused unless only --knob differs.",
)
@click.option("--knob", default="", help="The one part of the case that was turned, such as flags.tidegate.")
@click.option("--seed", default=0, show_default=True, type=int, help="Of the prompts, lengths and arrivals.")
@click.option("--quick", is_flag=True, help="Small loads: the directions stay, the figures are rough.")
@json_option
def engine(
    *,
    model: str,
    only: str,
    against: tuple[str, ...],
    pairs: int,
    peer_format: str | None,
    forward: str | None,
    weights: str | None,
    ours_flags: tuple[str, ...],
    keep_env: Path | None,
    compare: Path | None,
    knob: str,
    seed: int,
    quick: bool,
    json_path: Path | None,
) -> None:
    """Measure the engine over HTTP on two cores, alone or in turns with peers on the same machine.

    W1 one stream, W2 prefill, W3 batches, W4 shared prefixes, W5 Poisson arrivals. Both sides get the same tokens and
    make as many as they are asked for.
    """
    from rich.console import Console

    from dataplane.bench.engine.bench import Asked, run
    from dataplane.bench.engine.compare import compare_with
    from dataplane.bench.engine.peers.ours import flags_of
    from dataplane.bench.errors import BenchError, CaseError
    from dataplane.bench.report import emit
    from dataplane.errors import ConfigError

    names = [name.strip() for name in only.split(",") if name.strip()]
    if unknown := [name for name in names if name not in LOADS]:
        refuse(f"there is no load {unknown[0]}; there are {', '.join(LOADS)}")
    if peer_format and "llama.cpp" not in against:
        refuse("--peer-format needs --against llama.cpp")
    try:
        flags = flags_of({"--forward": forward, "--weights": weights}, ours_flags)
    except BenchError as error:
        refuse(str(error))
    asked = Asked(
        model=model,
        only=names,
        against=against,
        pairs=pairs,
        quick=quick,
        seed=seed,
        flags=flags,
        peer_format=peer_format or "",
        environments=keep_env,
    )
    try:
        outcome = run(asked, Console(stderr=True, highlight=False))
    except ConfigError as error:
        refuse(str(error))
    except BenchError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    refused = ""
    if compare is not None:
        try:
            outcome.report.tables.append(compare_with(compare, outcome.report, knob))
        except CaseError as error:
            refused = str(error)
    emit(outcome.report, json_path)
    if refused:
        refuse(refused)
    for name, why in {**outcome.missing, **outcome.failed}.items():
        click.echo(f"Error: {name}: {why}", err=True)
    if outcome.failed or outcome.missing:
        sys.exit(EXIT_FAILED if outcome.failed else EXIT_MISSING)


@bench.command()
@click.option("--model", default="smollm2", show_default=True, help="Packaged name, GGUF file or model folder.")
@click.option("--only", default="", help="Measure the cases whose name contains this.")
@json_option
def grammar(*, model: str, only: str, json_path: Path | None) -> None:
    """Compare what structured output costs with llguidance, and with xgrammar where it is installed."""
    from dataplane.bench.grammar import run
    from dataplane.bench.report import emit
    from dataplane.config import find_model
    from dataplane.errors import ConfigError

    try:
        emit(run(find_model(model)[0], only=only), json_path)
    except ConfigError as error:
        refuse(str(error))


@bench.command()
@click.option("--model", default="smollm2", show_default=True, help="Packaged name, GGUF file or model folder.")
@click.option("--batch", default=32, show_default=True, type=click.IntRange(1), help="Requests of a step.")
@click.option("--history", default=4096, show_default=True, type=click.IntRange(64), help="Tokens of the long history.")
@click.option("--rounds", default=7, show_default=True, type=click.IntRange(1), help="Turns of each history.")
@click.option("--forward", default="auto", show_default=True, help="How a step is run.")
@click.option("--weights", default="auto", show_default=True, help="How weights are kept.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads.  [default: the cores of this process]")
@click.option("--seed", default=0, show_default=True, type=int, help="Of the prompts and the order of turns.")
@json_option
def host(
    *,
    model: str,
    batch: int,
    history: int,
    rounds: int,
    forward: str,
    weights: str,
    threads: int | None,
    seed: int,
    json_path: Path | None,
) -> None:
    """Measure what a decode step costs beside the network, and that a long history costs no more of it."""
    from dataplane.bench.host import HostCase, run
    from dataplane.bench.report import emit
    from dataplane.errors import ConfigError
    from dataplane.hardware.device import cores

    case = HostCase(
        model=model,
        threads=threads or cores(),
        batch=batch,
        long=history,
        rounds=rounds,
        seed=seed,
        forward=forward,
        weights=weights,
    )
    try:
        emit(run(case, lambda part: click.echo(f"{part} …", err=True)), json_path)
    except ConfigError as error:
        refuse(str(error))


@bench.command()
@click.option("--model", default="smollm2", show_default=True, help="Packaged name, GGUF file or model folder.")
@click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What is scored.  [default: a text of prose and code that comes with the package]",
)
@click.option("--tokens", default=0, show_default=True, type=click.IntRange(0), help="Score the first so many; 0 all.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads.  [default: the cores of this process]")
@json_option
def quality(*, model: str, text: Path | None, tokens: int, threads: int | None, json_path: Path | None) -> None:
    """Measure what weights in fewer bits cost: perplexity, agreement and divergence against float32."""
    from dataplane.bench.quality import QualityCase, run
    from dataplane.bench.report import emit
    from dataplane.errors import ConfigError
    from dataplane.hardware.device import cores

    def tell(part: str) -> None:
        click.echo(f"{part} …", err=True)

    try:
        case = QualityCase(model, threads or cores(), tokens, text.read_text(encoding="utf-8") if text else "")
        emit(run(case, tell), json_path)
    except ConfigError as error:
        refuse(str(error))
    except (OSError, UnicodeDecodeError) as error:
        refuse(f"cannot read the text: {error}")


@bench.command()
@click.option(
    "--trace",
    type=click.Path(exists=True, path_type=Path),
    help="Folder of public traces, or one of them.  [default: none; parts that need one are skipped]",
)
@click.option(
    "--calibration",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Profile of DistServe's with OPT-13B.  [default: its A100 one, built in]",
)
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(["overhead", "batching", "capacity", "chunking", "fairness", "cache"]),
    help="Run this part; may be given several times.",
)
@click.option("--seed", default=0, show_default=True, type=int, help="Of made-up lengths and arrivals.")
@click.option("--quick", is_flag=True, help="Small sizes: the directions stay, the figures are rough.")
@json_option
def scheduler(
    *,
    trace: Path | None,
    calibration: Path | None,
    only: tuple[str, ...],
    seed: int,
    quick: bool,
    json_path: Path | None,
) -> None:
    """Measure what each scheduling policy gains and costs, over the real scheduler and a simulated machine.

    Batching modes, KV capacity, chunked prefill, fairness, cache-aware order; and what scheduling itself takes. Each
    beside a control and the regime where it loses.
    """
    from dataplane.bench.report import emit
    from dataplane.bench.scheduler import run
    from dataplane.bench.traces import TraceError

    def tell(part: str) -> None:
        click.echo(f"{part} …", err=True)

    try:
        report = run(trace, calibration=calibration, only=only, seed=seed, quick=quick, tell=tell)
    except TraceError as error:
        refuse(str(error))
    emit(report, json_path)


def refuse(sentence: str) -> NoReturn:
    click.echo(f"Error: {sentence}", err=True)
    sys.exit(EXIT_USAGE)
