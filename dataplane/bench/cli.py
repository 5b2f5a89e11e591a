"""`tidegate bench`: measure the engine and its policies.

Layer: service. Reads flags, says what is wrong in one sentence and exits with 2. A bench's module is imported when
its command runs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

import click

EXIT_USAGE = 2


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
