"""Published kernel measurements on an H200, as rows the data gate understands.

Layer: service. Reads the parquet tables of ai-dynamo/aiconfigurator (vLLM 0.22 for products and attention, 0.19 for
MLA and MoE); it judges nothing. Each row becomes the work the cost model says its shape takes, beside its latency.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dataplane.errors import ConfigError
from dataplane.hardware.costmodel import (
    BF16,
    FP8,
    FP8_BLOCK,
    MXFP4,
    Format,
    Op,
    Precision,
    attention,
    causal_pairs,
    experts,
    grouped,
    latent_attention,
    least_touched,
    linear,
    touched_experts,
)
from dataplane.hardware.datagate import Measured
from dataplane.hardware.geometry import DEEPSEEK_V3, Geometry, Latent

Row = Mapping[str, Any]

MAX_ROWS = 1_000_000
KV_FORMATS = {"bfloat16": BF16, "fp8": FP8}
PRODUCTS = {"bfloat16": (BF16, BF16, Precision.BF16), "fp8_block": (FP8_BLOCK, FP8, Precision.FP8)}
"""Weights, inputs, and in what they are multiplied; outputs are bf16."""
EXPERTS = {
    "bfloat16": (BF16, Precision.BF16),
    "fp8": (FP8, Precision.FP8),
    "fp8_block": (FP8_BLOCK, Precision.FP8),
    "int4_wo": (grouped(4, zero=False), Precision.BF16),
    "w4a16_mxfp4": (MXFP4, Precision.BF16),
}
"""Weights, and in what they are multiplied."""
MLA_MODEL = "deepseek-ai/DeepSeek-V3"


@dataclass(frozen=True, slots=True)
class KernelTable:
    """One kind of kernel on one kind of shape."""

    name: str
    rows: tuple[Measured, ...]


Reader = Callable[[Row], tuple[str, Measured] | None]
"""A row to (the table it belongs to, what it measured), or None if its columns do not say."""


@dataclass(frozen=True, slots=True)
class KernelTables:
    """What a folder held. `skipped` counts, by file, rows whose columns do not say what was computed."""

    tables: tuple[KernelTable, ...]
    skipped: Mapping[str, int]


def read_tables(folder: Path) -> KernelTables:
    """Every table that is in `folder`.

    Raises ConfigError without pyarrow, for a folder without any table, and for a table that is damaged.
    """
    found: list[KernelTable] = []
    skipped: dict[str, int] = {}
    for file, (columns, reader) in READERS.items():
        if (folder / file).exists():
            tables, skipped[file] = _sorted_out(file, _rows(folder / file, columns), reader)
            found += tables
    if not skipped:
        raise ConfigError(f"there is none of {', '.join(READERS)} in {folder}")
    return KernelTables(tuple(found), skipped)


def _sorted_out(file: str, rows: Iterator[Row], reader: Reader) -> tuple[list[KernelTable], int]:
    sets: dict[str, list[Measured]] = {}
    skipped = 0
    for row in rows:
        try:
            read = reader(row)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise ConfigError(f"{file} has a row that cannot be: {error!r} in {dict(row)}") from error
        if read is None:
            skipped += 1
        else:
            sets.setdefault(read[0], []).append(read[1])
    return [KernelTable(name, tuple(measured)) for name, measured in sorted(sets.items())], skipped


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ConfigError(
            "reading parquet tables needs the package pyarrow: install tidegate with its extra `bench`"
        ) from None
    try:
        with ParquetFile(path) as file:
            if file.metadata.num_rows > MAX_ROWS:
                raise ConfigError(f"{path.name} has {file.metadata.num_rows} rows; at most {MAX_ROWS} are read")
            missing = [name for name in columns if name not in file.schema_arrow.names]
            if missing:
                raise ConfigError(f"{path.name} lacks the column {', '.join(missing)}")
            for batch in file.iter_batches(columns=list(columns)):
                yield from batch.to_pylist()
    except (OSError, ArrowException) as error:
        raise ConfigError(f"cannot read {path.name}: {error}") from error


def _measured(row: Row, shape: tuple[str, ...], least: tuple[Op, ...], model: tuple[Op, ...] = ()) -> Measured:
    label = " ".join(f"{name}={row[name]}" for name in shape)
    return Measured(label, row["latency"] / 1e3 if row["latency"] is not None else 0.0, least, model)


GEMM = ("gemm_dtype", "m", "n", "k")


def _gemm(row: Row) -> tuple[str, Measured] | None:
    if (known := PRODUCTS.get(row["gemm_dtype"])) is None:
        return None
    weights, inputs, precision = known
    op = linear(row["m"], row["k"], row["n"], weights, activations=inputs, written=BF16, precision=precision)
    return f"product, {row['gemm_dtype']}", _measured(row, GEMM, (op,))


CONTEXT = ("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim", "kv_cache_dtype", "window_size")


def _context(row: Row) -> tuple[str, Measured] | None:
    batch, tokens, window = row["batch_size"], row["isl"], row["window_size"]
    op = _attention(row, batch * tokens, batch * causal_pairs(tokens, 0, window), batch * tokens)
    return f"prefill attention, {_variant(row)}", _measured(row, CONTEXT, (op,))


GENERATION = ("batch_size", "step", "num_heads", "num_key_value_heads", "head_dim", "kv_cache_dtype", "window_size")


def _generation(row: Row) -> tuple[str, Measured] | None:
    keys = row["step"] + 1
    seen = row["batch_size"] * (min(keys, row["window_size"]) if row["window_size"] else keys)
    op = _attention(row, row["batch_size"], seen, seen)
    return f"decode attention, {_variant(row)}", _measured(row, GENERATION, (op,))


def _attention(row: Row, queries: int, pairs: int, context: int) -> Op:
    return attention(
        queries=queries, pairs=pairs, context=context, heads=row["num_heads"], kv_heads=row["num_key_value_heads"],
        head_dim=row["head_dim"], kv=KV_FORMATS[row["kv_cache_dtype"]],
    )  # fmt: skip


def _variant(row: Row) -> str:
    return f"{row['kv_cache_dtype']} KV" + (", windowed" if row["window_size"] else "")


MLA_CONTEXT = ("num_heads", "batch_size", "isl", "gemm_type", "kv_cache_dtype")


def _mla_context(row: Row) -> tuple[str, Measured] | None:
    """Decompressed, as a prefill runs: heads of d_nope + d_R and d_v, and every projection once."""
    if row["model"] != MLA_MODEL or row["gemm_type"] not in PRODUCTS:
        return None
    geometry, latent = _deepseek(row)
    tokens = row["batch_size"] * row["isl"]
    pairs = row["batch_size"] * causal_pairs(row["isl"])
    head = latent.nope_dim + latent.rope_dim + latent.value_dim
    core = Op("attention", 2.0 * geometry.heads * head * pairs, 0.0)
    projections = _projections(row, geometry.attention_parameters, tokens)
    return f"MLA prefill, {row['gemm_type']}", _measured(row, MLA_CONTEXT, (projections, core))


MLA_GENERATION = ("num_heads", "batch_size", "step", "gemm_type", "kv_cache_dtype")


def _mla_generation(row: Row) -> tuple[str, Measured] | None:
    """Absorbed, as decode runs: the up-projections act on queries and outputs, in bf16."""
    if row["model"] != MLA_MODEL or row["gemm_type"] not in PRODUCTS:
        return None
    geometry, latent = _deepseek(row)
    tokens, context = row["batch_size"], row["batch_size"] * row["step"]
    up = latent.rank * geometry.heads * (latent.nope_dim + latent.value_dim)
    core = latent_attention(
        queries=tokens, pairs=context, context=context, heads=geometry.heads, rank=latent.rank,
        rope_dim=latent.rope_dim, kv=KV_FORMATS[row["kv_cache_dtype"]], activations=None,
    )  # fmt: skip
    ops = (
        _projections(row, geometry.attention_parameters - up, tokens),
        linear(tokens, up, 1, BF16, activations=None, name="absorbed up-projections"),
        core,
    )
    return f"MLA decode, {row['gemm_type']}", _measured(row, MLA_GENERATION, ops)


def _deepseek(row: Row) -> tuple[Geometry, Latent]:
    geometry = replace(DEEPSEEK_V3, heads=row["num_heads"])
    assert geometry.latent is not None
    return geometry, geometry.latent


def _projections(row: Row, parameters: int, tokens: int) -> Op:
    weights, _, precision = PRODUCTS[row["gemm_type"]]
    weight_work = linear(tokens, parameters, 1, weights, activations=None, precision=precision, name="projections")
    moved = weight_work.bytes + 2 * tokens * DEEPSEEK_V3.hidden * BF16.bytes_each
    return Op(weight_work.name, weight_work.flops, moved, precision)


MOE = (
    "moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size",
    "distribution",
)  # fmt: skip


def _moe(row: Row) -> tuple[str, Measured] | None:
    """Balanced routing touches at least as many experts as uniform choice. Skewed routing touches fewer: only one
    token's are certain, and on one rank of several not even those, so that such rows are skipped."""
    if (known := EXPERTS.get(row["moe_dtype"])) is None:
        return None
    ranks, shape = row["moe_ep_size"], (row["num_experts"], row["topk"], row["num_tokens"])
    uniform = _routed(row, known, touched_experts(*shape) / ranks)
    if row["distribution"] == "balanced":
        return f"experts, {row['moe_dtype']}, balanced", _measured(row, MOE, (uniform,))
    if ranks > 1:
        return None
    certain = _routed(row, known, least_touched(*shape))
    return f"experts, {row['moe_dtype']}, skewed", _measured(row, MOE, (certain,), (uniform,))


def _routed(row: Row, known: tuple[Format, Precision], touched: float) -> Op:
    weights, precision = known
    return experts(
        tokens=row["num_tokens"], hidden=row["hidden_size"], inner=row["inter_size"] // row["moe_tp_size"],
        top_k=row["topk"], touched=touched, weights=weights, precision=precision, share=1 / row["moe_ep_size"],
    )  # fmt: skip


READERS: Mapping[str, tuple[tuple[str, ...], Reader]] = {
    "h200_gemm_perf.parquet": ((*GEMM, "latency"), _gemm),
    "h200_context_attention_perf.parquet": ((*CONTEXT, "latency"), _context),
    "h200_generation_attention_perf.parquet": ((*GENERATION, "latency"), _generation),
    "h200_mla_context_module_perf.parquet": ((*MLA_CONTEXT, "model", "latency"), _mla_context),
    "h200_mla_generation_module_perf.parquet": ((*MLA_GENERATION, "model", "latency"), _mla_generation),
    "h200_moe_perf.parquet": ((*MOE, "latency"), _moe),
}
"""By file name: the columns that are read, and what a row of them means."""
