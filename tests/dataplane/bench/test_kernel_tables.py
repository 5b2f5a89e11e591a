"""Published tables: what a row means, what is refused, and the reference figures of the H200."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from dataplane.bench import roofline
from dataplane.bench.kernel_tables import KernelTable, read_tables
from dataplane.bench.report import Report
from dataplane.errors import ConfigError
from dataplane.hardware.costmodel import causal_pairs, touched_experts
from dataplane.hardware.datagate import IN_CACHE, OVER_COMPUTE, gate, ratios, violations
from dataplane.hardware.datasheets import H200

PUBLISHED = Path(__file__).parents[4] / "shared" / "traces" / "aiconfigurator"
CEILINGS = H200.ceilings()

GEMM = {"gemm_dtype": "bfloat16", "m": 4096, "n": 4096, "k": 4096, "latency": 0.2}
CONTEXT = {
    "batch_size": 2, "isl": 1000, "num_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "kv_cache_dtype": "bfloat16", "window_size": 0, "latency": 0.5,
}  # fmt: skip
GENERATION = {
    "batch_size": 16, "step": 8191, "num_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "kv_cache_dtype": "fp8", "window_size": 1024, "latency": 0.5,
}  # fmt: skip
MOE = {
    "moe_dtype": "bfloat16", "num_tokens": 8, "hidden_size": 7168, "inter_size": 2048, "topk": 8, "num_experts": 256,
    "moe_tp_size": 1, "moe_ep_size": 1, "distribution": "balanced", "latency": 5.0,
}  # fmt: skip
MLA = {
    "num_heads": 128, "batch_size": 4, "isl": 1024, "step": 0, "gemm_type": "bfloat16", "kv_cache_dtype": "bfloat16",
    "model": "deepseek-ai/DeepSeek-V3", "latency": 5.0,
}  # fmt: skip


def write(folder: Path, file: str, *rows: dict[str, Any]) -> Path:
    arrow = pytest.importorskip("pyarrow", reason="parquet tables are written and read with pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(list(rows)), folder / file)
    return folder


def only(folder: Path) -> KernelTable:
    (table,) = read_tables(folder).tables
    return table


def test_a_product_is_its_shape_in_its_formats(tmp_path: Path) -> None:
    (row,) = only(write(tmp_path, "h200_gemm_perf.parquet", GEMM)).rows
    assert row.seconds == pytest.approx(2e-4)
    assert (row.least[0].flops, row.least[0].bytes) == (2 * 4096**3, 3 * 4096**2 * 2)
    assert "m=4096" in row.label


def test_attention_counts_causal_pairs_and_a_window_only_what_it_sees(tmp_path: Path) -> None:
    (row,) = only(write(tmp_path, "h200_context_attention_perf.parquet", CONTEXT)).rows
    assert row.least[0].flops == 4 * 32 * 128 * 2 * causal_pairs(1000)
    (tmp_path / "h200_context_attention_perf.parquet").unlink()
    (decode,) = only(write(tmp_path, "h200_generation_attention_perf.parquet", GENERATION)).rows
    assert decode.least[0].flops == 4 * 32 * 128 * 16 * 1024
    assert decode.least[0].bytes == 16 * 1024 * 2 * 8 * 128 + 2 * 16 * 32 * 128 * 2, "an fp8 key is one byte"


def test_mla_runs_decompressed_in_prefill_and_absorbed_in_decode(tmp_path: Path) -> None:
    write(tmp_path, "h200_mla_context_module_perf.parquet", MLA)
    (prefill,) = only(tmp_path).rows
    assert prefill.least[1].flops == 2 * 128 * (128 + 64 + 128) * 4 * causal_pairs(1024)
    (tmp_path / "h200_mla_context_module_perf.parquet").unlink()
    write(tmp_path, "h200_mla_generation_module_perf.parquet", {**MLA, "isl": 1, "step": 1024})
    (decode,) = only(tmp_path).rows
    assert decode.least[2].flops == 2 * 128 * (2 * 512 + 64) * 4 * 1024
    assert decode.least[2].bytes == 4 * 1024 * 576 * 2
    assert sum(op.flops for op in prefill.least[:1]) == pytest.approx(
        1024 * sum(op.flops for op in decode.least[:2])
    ), "both multiply every token with every projection"


def test_skewed_experts_are_held_to_what_is_certain_and_compared_with_what_is_expected(tmp_path: Path) -> None:
    skewed = {**MOE, "distribution": "power_law_1.2"}
    read = read_tables(write(tmp_path, "h200_moe_perf.parquet", MOE, skewed, {**skewed, "moe_ep_size": 4}))
    balanced, uneven = (table.rows[0] for table in read.tables)
    expert = 3 * 7168 * 2048 * 2
    assert balanced.least[0].bytes == pytest.approx(touched_experts(256, 8, 8) * expert, rel=1e-3)
    assert uneven.least[0].bytes == pytest.approx(8 * expert, rel=1e-3)
    assert uneven.expected[0].bytes == balanced.least[0].bytes
    assert read.skipped == {"h200_moe_perf.parquet": 1}, "a rank's share of a skewed routing is not in the table"


def test_a_table_that_implies_47_times_the_peak_is_thrown_out(tmp_path: Path) -> None:
    false = {**GEMM, "m": 16384, "latency": 1e3 * 2 * 16384 * 4096**2 / (47 * 989e12)}
    gated = gate(only(write(tmp_path, "h200_gemm_perf.parquet", GEMM, false)).rows, CEILINGS)
    assert [row.label for row in gated.dropped] == ["gemm_dtype=bfloat16 m=16384 n=4096 k=4096"]
    assert gated.dropped[0].reason == OVER_COMPUTE
    assert gated.dropped[0].ratio == pytest.approx(47)
    assert len(gated.kept) == 1


def test_the_bench_counts_violations_before_the_gate_after_it_and_under_half_a_device(tmp_path: Path) -> None:
    false = {**GEMM, "m": 16384, "latency": 1e3 * 2 * 16384 * 4096**2 / (47 * 989e12)}
    write(tmp_path, "h200_gemm_perf.parquet", GEMM, {**GEMM, "latency": 1.0}, false)
    report = Report("roofline", {}, 0)
    roofline._published(report, tmp_path)
    found = report.results["h200"]["product, bfloat16"]
    assert found["dropped"] == {OVER_COMPUTE: 1}
    assert [row["row"] for row in report.results["dropped"]] == ["gemm_dtype=bfloat16 m=16384 n=4096 k=4096"]
    assert (found["violations_before"], found["violations"]) == (1, 0)
    assert found["violations_at_half"] == 1, "the one at 0.7 of the peak, not the one at 0.14"


@pytest.mark.parametrize("latency", [None, 0.0, -1.0, float("nan")])
def test_a_row_without_a_time_is_dropped_by_the_gate(tmp_path: Path, latency: float | None) -> None:
    rows = only(write(tmp_path, "h200_gemm_perf.parquet", GEMM, {**GEMM, "latency": latency})).rows
    assert len(gate(rows, CEILINGS).dropped) == 1


def test_what_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is none of h200_gemm_perf"):
        read_tables(tmp_path)
    write(tmp_path, "h200_gemm_perf.parquet", {name: value for name, value in GEMM.items() if name != "k"})
    with pytest.raises(ConfigError, match="lacks the column k"):
        read_tables(tmp_path)
    write(tmp_path, "h200_gemm_perf.parquet", {**GEMM, "m": -3})
    with pytest.raises(ConfigError, match="has a row that cannot be"):
        read_tables(tmp_path)
    (tmp_path / "h200_gemm_perf.parquet").write_bytes(b"no parquet")
    with pytest.raises(ConfigError, match=r"cannot read h200_gemm_perf\.parquet"):
        read_tables(tmp_path)


def test_without_pyarrow_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "h200_gemm_perf.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match="needs the package pyarrow: install tidegate with its extra `bench`"):
        read_tables(tmp_path)


@pytest.mark.slow
def test_the_h200_tables_lie_under_the_roofline_where_they_are_known_to() -> None:
    """Reference figures of the published tables: none beats the roofline but three products that sat in the L2."""
    pytest.importorskip("pyarrow", reason="parquet tables are read with pyarrow")
    if not PUBLISHED.exists():
        pytest.skip(f"the tables are not in {PUBLISHED}")
    tables = {table.name: table for table in read_tables(PUBLISHED).tables}
    gated = {name: gate(table.rows, CEILINGS, cache_bytes=H200.cache_bytes) for name, table in tables.items()}
    assert {name: dict(found.reasons) for name, found in gated.items() if found.dropped} == {
        "product, bfloat16": {IN_CACHE: 3}
    }
    assert sum(violations(table.rows, CEILINGS) for table in tables.values()) == 3
    assert sum(violations(found.kept, CEILINGS) for found in gated.values()) == 0
    assert sum(violations(found.kept, CEILINGS.halved()) for found in gated.values()) > 1000

    def large(name: str) -> float:
        kept = [row for row in gated[name].kept if CEILINGS.seconds(row.expected) >= 2e-4]
        return median(ratios(kept, CEILINGS))

    assert 0.61 <= large("product, bfloat16") <= 0.75
    assert 0.44 <= large("prefill attention, bfloat16 KV") <= 0.56
    assert large("decode attention, bfloat16 KV") == pytest.approx(0.78, abs=0.01)
    skewed = ratios(gated["experts, bfloat16, skewed"].kept, CEILINGS)
    assert 0 < sum(ratio > 1 for ratio in skewed) / len(skewed) < 0.25, "where uniform routing is a wrong assumption"
