"""`tidegate bench roofline`: the cost model beside measurements, and where it fails.

Layer: service. Three comparisons: published H200 kernels, operators of this CPU, and the engine's TTFT with prefix
hits. Every measured row passes the data gate first; the table says what it dropped.

Results, as in the JSON file:
`devices` (by name: bf16 FLOP/s, bandwidth, critical batch), `kv_bytes_per_token` (by model),
`h200` (by table: rows, dropped by reason, `violations`, median and largest roofline/measured, the same for large rows,
share of rows the model expects to be slower than they are, fitted η_F, η_W, launch and held-out error),
`dropped` (label, ratio, reason), `skipped` (by file),
`cpu` (ceilings, `balance` in FLOP/byte, `violations`; by operator: seconds, intensity in FLOP/byte, ratio),
`loading` (from how many bytes/s on it pays to load a cached prefix, how many this memory copies, whether it `pays`),
`engine` (step coefficients with errors; by hit ratio: TTFT, both predictions, TPOT, and the gain in tokens a minute:
Amdahl's bound, predicted, measured).
`violations` are rows above a ceiling that the gate has left, `violations_before` those before it; the control,
`violations_at_half`, are rows that the gate has left and that are above half of a ceiling, if any reach that far.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from dataplane.bench.engine_ttft import DECODED, EngineBench, EngineResult
from dataplane.bench.kernel_tables import KernelTable, read_tables
from dataplane.bench.report import Report, Table
from dataplane.config import find_model
from dataplane.hardware.costmodel import BF16, Ceilings, Precision
from dataplane.hardware.datagate import Gated, Measured, calibrate, gate, ratios, violations
from dataplane.hardware.datasheets import H200, SHEETS, DataSheet
from dataplane.hardware.geometry import KNOWN, Geometry
from dataplane.hardware.hit_area import worth_loading
from dataplane.hardware.probe import OperatorTimer, probe
from dataplane.models.shape import ModelShape

HIT_RATIOS = (0.0, 0.3, 0.6, 0.9)
LARGE_S = 2e-4
"""A row is large from this roofline on: launches and tails no longer decide its time."""
NAMED = 12
"""Dropped rows that are printed; the file has all."""


@dataclass(frozen=True, slots=True)
class RooflineCase:
    """What shapes a run."""

    model: str = "smollm2"
    prompt: int = 1024
    repeats: int = 5
    threads: int = 1
    probe_seconds: float = 2.0
    seed: int = 0
    engine: bool = True


def run(case: RooflineCase, tables: Path | None = None) -> Report:
    """Raises ConfigError for a model or tables that cannot be read."""
    report = Report("roofline", asdict(case), case.seed)
    _devices(report)
    if tables is not None:
        _published(report, tables)
    _cpu(report, case)
    if case.engine:
        _engine(report, case)
    return report


def _devices(report: Report) -> None:
    rows = []
    for sheet in SHEETS:
        batch = sheet.critical_batch(Precision.BF16, BF16).value
        flops, bandwidth = sheet.flops[Precision.BF16].value, sheet.bandwidth.value
        report.results.setdefault("devices", {})[sheet.name] = {
            "bf16_flops": flops, "bandwidth": bandwidth, "critical_batch": batch, "source": sheet.bandwidth.source,
        }  # fmt: skip
        rows.append((sheet.name, f"{flops / 1e12:,.0f}", f"{bandwidth / 1e12:.2f}", f"{batch:.0f}"))
    columns = ("device", "bf16 TFLOP/s", "TB/s", "critical batch, tokens")
    sources = "; ".join(dict.fromkeys(sheet.bandwidth.source for sheet in SHEETS))
    report.tables.append(Table("Data sheets (configured)", columns, tuple(rows), f"Sources: {sources}."))
    report.results["kv_bytes_per_token"] = {geometry.name: geometry.kv_bytes_per_token() for geometry in KNOWN}
    report.tables.append(
        Table(
            "KV cache (configured)",
            ("model", "bytes per token", "active parameters"),
            tuple(
                (model.name, f"{model.kv_bytes_per_token():,.0f}", f"{model.active_parameters:,}") for model in KNOWN
            ),
        )
    )


def _published(report: Report, folder: Path) -> None:
    read = read_tables(folder)
    ceilings, found, gates = H200.ceilings(), {}, []
    for table in read.tables:
        gated = gate(table.rows, ceilings, cache_bytes=H200.cache_bytes)
        gates.append((table, gated))
        if len(gated.kept) > 1:
            found[table.name] = _summary(table, gated, ceilings)
    report.results |= {
        "h200": found,
        "skipped": dict(read.skipped),
        "dropped": [
            {"table": table.name, "row": row.label, "ratio": row.ratio, "reason": row.reason}
            for table, gated in gates for row in gated.dropped
        ],
    }  # fmt: skip
    columns = (
        "kernel", "rows", "beat it", "dropped", "left", "at half", "median", "large rows", "median", "p90",
        "largest", "over", "η_F", "η_W", "error",
    )  # fmt: skip
    rows = tuple((name, *_cells(values)) for name, values in found.items())
    skipped = sum(read.skipped.values())
    note = (
        "Roofline over measured time: 1 is the data sheet's peak. Large: a roofline of 200 µs or more. Beat it: rows "
        "above a ceiling before the gate; left: after it; at half: of those it kept, above half of a ceiling, which "
        "shows that the count can find some. Over: rows that took less than the cost model expects, where it assumes "
        "that every token chooses its experts uniformly; skewed routing touches fewer. η and error: calibrated on "
        "every other row, scored on the rest."
        + (f" {skipped:,} rows do not say what one rank computed and were skipped." if skipped else "")
    )
    report.tables.append(Table("Cost model against published H200 kernels", columns, rows, note))
    report.tables.append(_dropped("What the gate dropped of the H200 tables", gates))


def _summary(table: KernelTable, gated: Gated, ceilings: Ceilings) -> dict[str, Any]:
    found = ratios(gated.kept, ceilings)
    large = [ratio for ratio, row in zip(found, gated.kept, strict=True) if ceilings.seconds(row.expected) >= LARGE_S]
    reached = calibrate(gated.kept, ceilings, small_s=LARGE_S)
    return {
        "rows": len(table.rows),
        "dropped": dict(gated.reasons),
        **_violations(table.rows, gated, ceilings),
        "median": median(found),
        "largest": max(found),
        "large_rows": len(large),
        "large_median": median(large) if large else None,
        "large_p90": quantiles(large, n=10)[8] if len(large) > 1 else None,
        "over": sum(ratio > 1 for ratio in found) / len(found),
        "flops_share": reached.flops_share,
        "bandwidth_share": reached.bandwidth_share,
        "launch_s": reached.launch_s,
        "held_out_error": reached.error,
    }


def _violations(rows: Sequence[Measured], gated: Gated, ceilings: Ceilings) -> dict[str, int]:
    return {
        "violations": violations(gated.kept, ceilings),
        "violations_before": violations(rows, ceilings),
        "violations_at_half": violations(gated.kept, ceilings.halved()),
    }


def _cells(values: Mapping[str, Any]) -> Iterator[str]:
    yield f"{values['rows']:,}"
    yield f"{values['violations_before']:,}"
    yield f"{sum(values['dropped'].values()):,}"
    yield f"{values['violations']:,}"
    yield f"{values['violations_at_half']:,}"
    yield f"{values['median']:.2f}"
    yield f"{values['large_rows']:,}"
    for name in ("large_median", "large_p90"):
        yield "–" if values[name] is None else f"{values[name]:.2f}"
    yield f"{values['largest']:.2f}"
    yield f"{values['over']:.1%}"
    yield f"{values['flops_share']:.2f}"
    yield f"{values['bandwidth_share']:.2f}"
    yield f"{values['held_out_error']:.0%}"


def _dropped(title: str, gates: list[tuple[KernelTable, Gated]]) -> Table:
    every = [(table.name, row) for table, gated in gates for row in gated.dropped]
    worst = sorted(every, key=lambda pair: -pair[1].ratio)
    rows = tuple((name, row.label, f"{row.ratio:.2f}", row.reason) for name, row in worst[:NAMED])
    more = f"{len(every) - NAMED:,} more are in the JSON file." if len(every) > NAMED else ""
    return Table(title, ("kernel", "row", "roofline / measured", "why"), rows, more or ("" if every else "Nothing."))


def _cpu(report: Report, case: RooflineCase) -> None:
    """The ceilings are probed before and after the operators, and the better of both stands."""
    shape = ModelShape.read(find_model(case.model)[0])
    before = probe(case.threads, seconds=case.probe_seconds)
    measured = list(_operators(shape, case))
    after = probe(case.threads, seconds=case.probe_seconds)
    sheet = _better(before, after)
    ceilings = sheet.ceilings()
    gated = gate(measured, ceilings)
    found = dict(zip((row.label for row in gated.kept), ratios(gated.kept, ceilings), strict=True))
    fp32, geometry = sheet.flops[Precision.FP32].value, Geometry.of(shape, case.model)
    beaten = _violations(measured, gated, ceilings)
    report.results["cpu"] = {
        "name": sheet.name,
        "flops": {precision.value: figure.value for precision, figure in sheet.flops.items()},
        "bandwidth": sheet.bandwidth.value,
        "balance": fp32 / sheet.bandwidth.value,
        "critical_batch_fp32": sheet.critical_batch(Precision.FP32, geometry.weights).value,
        "operators": {
            row.label: {
                "seconds": row.seconds,
                "roofline_s": ceilings.seconds(row.least),
                "intensity": row.least[0].intensity,
                "ratio": found.get(row.label),
            }
            for row in measured
        },
        "median": median(found.values()) if found else None,
        **beaten,
        "dropped": [{"row": row.label, "ratio": row.ratio, "reason": row.reason} for row in gated.dropped],
    }
    rows = tuple(
        (
            row.label,
            f"{row.seconds * 1e3:.3f}",
            f"{ceilings.seconds(row.least) * 1e3:.3f}",
            f"{found[row.label]:.2f}" if row.label in found else "dropped",
            f"{row.least[0].intensity:.1f}",
            ceilings.bound(row.least[0]).value,
        )
        for row in measured
    )
    report.tables.append(
        Table(
            f"Cost model against operators of {sheet.name} (fp32)",
            ("operator", "measured ms", "roofline ms", "roofline / measured", "FLOP/byte", "bound"),
            rows,
            f"Probed ceilings: {fp32 / 1e9:.1f} GFLOP/s, {sheet.bandwidth.value / 1e9:.1f} GB/s; an operator of "
            f"fewer than {fp32 / sheet.bandwidth.value:.1f} FLOP/byte is bound by memory, a product of fewer than "
            f"{report.results['cpu']['critical_batch_fp32']:.0f} tokens (critical batch). Median ratio "
            f"{report.results['cpu']['median'] or float('nan'):.2f}, {beaten['violations_before']} beat a "
            f"ceiling, {len(gated.dropped)} dropped by the gate, {beaten['violations']} violations after it (control: "
            f"{beaten['violations_at_half']} at half of the ceilings). Operators stream through more memory than any "
            "cache holds: one beyond the ceilings says that the machine was busy while they were probed.",
        )
    )
    report.tables.append(_dropped("What the gate dropped of this CPU", [(KernelTable("CPU", ()), gated)]))
    _loading(report, geometry, case.prompt, fp32, sheet.bandwidth.value)


def _loading(report: Report, geometry: Geometry, prefix: int, flops: float, bandwidth: float) -> None:
    """Whether KV in host memory is worth having here. A copy reads and writes, so it moves half of the bandwidth."""
    group = geometry.heads // geometry.kv_heads
    least, copies = worth_loading(prefix, geometry.hidden, geometry.kv.bytes_each, group, flops), bandwidth / 2
    report.results["loading"] = {"pays_from": least, "copies": copies, "pays": copies > least}
    answer = "loading pays" if copies > least else "computing is quicker"
    report.tables.append(
        Table(
            f"A cached prefix of {prefix} tokens in host memory",
            ("loading pays from GB/s", "copies GB/s", "here"),
            ((f"{least / 1e9:.2f}", f"{copies / 1e9:.1f}", answer),),
            "Mooncake's condition (equation 2) at the probed FLOP/s; host and device memory are one here.",
        )
    )


def _operators(shape: ModelShape, case: RooflineCase) -> Iterator[Measured]:
    """The model's own products and attentions, at decode's and at prefill's sizes."""
    heads, width = (shape.heads, shape.kv_heads, shape.head_dim), shape.head_dim * (shape.heads + 2 * shape.kv_heads)
    products = (
        (shape.hidden, width), (shape.hidden, (shape.mlp_matrices - 1) * shape.intermediate),
        (shape.intermediate, shape.hidden),
    )  # fmt: skip
    timer = OperatorTimer(case.threads, 2 * case.repeats + 1)
    for tokens in (1, 8, 64, min(512, case.prompt)):
        for inputs, outputs in products:
            yield timer.linear(tokens, inputs, outputs)
    yield timer.linear(1, shape.hidden, shape.vocab)
    for batch in (1, 8):
        yield timer.decode(batch, case.prompt, heads)
    for tokens in (case.prompt // 4, case.prompt):
        yield timer.prefill(tokens, heads)


def _better(one: DataSheet, other: DataSheet) -> DataSheet:
    flops = {p: max(one.flops[p], other.flops[p], key=lambda figure: figure.value) for p in one.flops}
    bandwidth = max(one.bandwidth, other.bandwidth, key=lambda figure: figure.value)
    return replace(one, flops=flops, bandwidth=bandwidth)


def _engine(report: Report, case: RooflineCase) -> None:
    bench = EngineBench(case.model, prompt=case.prompt, threads=case.threads, seed=case.seed)
    result = bench.run(HIT_RATIOS, case.repeats)
    model, cold = result.model, result.hits[0]
    report.results["engine"] = {
        "coefficients": {name: asdict(figure) for name, figure in model.coefficients.items()},
        "fit": asdict(model.residuals),
        "held_out": asdict(result.held_out),
        "kappa": result.kappa,
        "hits": [asdict(hit) for hit in result.hits],
    }
    report.tables.append(_step_table(result))
    rows = tuple(
        (
            f"{hit.ratio:.1f}", f"{hit.cached}", f"{hit.saved:.3f}",
            f"{hit.ttft.median * 1e3:.0f} ({hit.ttft.least * 1e3:.0f}–{hit.ttft.most * 1e3:.0f})",
            f"{hit.by_area * 1e3:.0f}" if hit is not cold else "taken from here", _error(hit.by_area, hit.ttft.median),
            f"{hit.by_steps * 1e3:.0f}", _error(hit.by_steps, hit.ttft.median),
            f"{hit.tpot.median * 1e3:.1f}", f"{hit.tpot.median / cold.tpot.median:.2f}",
            f"{hit.gain_bound:.2f} / {hit.gain_predicted:.2f} / {hit.gain_measured:.2f}",
        ) for hit in result.hits
    )  # fmt: skip
    columns = (
        "hit ratio", "cached", "S", "TTFT ms", "by hit area", "error", "by step model", "error", "TPOT ms",
        "TPOT / cold", "TPM gain: bound / predicted / measured",
    )  # fmt: skip
    note = (
        f"Prompts of {result.prompt} tokens, κ = {result.kappa:.3f}, {cold.ttft.n} of each in random order, median "
        "(least–most). By hit area: TTFT without a hit, less what the hit saves of it; by step model: fitted to steps "
        f"without hits only. TPOT over {DECODED} tokens is the control: no prediction credits it, and it must stay at "
        "1.00. TPM gain: tokens a minute, one request at a time, against none cached; the bound is Amdahl's, for a "
        "prefill that takes no time; predicted is the TPM correction 1 / (1 − f_p·S)."
    )
    report.tables.append(Table("TTFT of the engine with prefix hits", columns, rows, note))


def _step_table(result: EngineResult) -> Table:
    model, held = result.model, result.held_out
    rows = tuple((name, f"{figure.value:.3e}", figure.unit) for name, figure in model.coefficients.items())
    return Table(
        "Step model (calibrated)",
        ("term", "value", "unit"),
        rows,
        f"{model.source}: fitted to {model.residuals.n} steps, median error {model.residuals.median:.1%}; on "
        f"{held.n} other steps median {held.median:.1%}, p90 {held.p90:.1%}, bias {held.bias:+.1%}.",
    )


def _error(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.0%}"
