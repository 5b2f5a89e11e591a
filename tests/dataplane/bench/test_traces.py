"""Traces: rows from four formats, and one sentence with file and line for whatever is wrong."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from dataplane.bench import traces
from dataplane.bench.traces import TraceError, TraceKind, TraceMissingError, TraceRow, Traces, read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
VTC = "req_time_s,client,prompt_len,output_len\n"
VIDUR = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n"


def written(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = text.encode() if isinstance(text, str) else text
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def mooncake(**fields: object) -> str:
    row = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]} | fields
    return json.dumps(row) + "\n"


def test_azure_times_count_from_the_first_row_and_keep_their_fractions(tmp_path: Path) -> None:
    text = AZURE + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    trace = read_trace(written(tmp_path / "a.csv.gz", text))
    assert trace.kind is TraceKind.AZURE
    assert trace.rows[0] == TraceRow(0.0, 374, 44)
    assert trace.rows[1].arrival == pytest.approx(4.314579, abs=2e-6)


def test_vtc_rows_have_clients(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "v.csv", VTC + "1.5,c13,13,199\n2.0,c2,36,137\n"))
    assert trace.kind is TraceKind.VTC
    assert trace.rows == (TraceRow(0.0, 13, 199, "c13"), TraceRow(0.5, 36, 137, "c2"))


def test_vidur_rows_are_lengths(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "x.csv", VIDUR + "3772,54,3826,69.85\n\n2015,156,2171,12.9\n"))
    assert trace.kind is TraceKind.VIDUR
    assert trace.rows == (TraceRow(0.0, 3772, 54), TraceRow(0.0, 2015, 156))


def test_mooncake_times_are_milliseconds_and_blocks_come_with_the_rows(tmp_path: Path) -> None:
    text = mooncake() + mooncake(timestamp=1500, input_length=512, hash_ids=[7])
    trace = read_trace(written(tmp_path / "m.jsonl.gz", text))
    assert trace.kind is TraceKind.MOONCAKE
    assert trace.rows == (TraceRow(0.0, 600, 5, blocks=(0, 1)), TraceRow(1.5, 512, 5, blocks=(7,)))


def test_no_more_rows_than_asked_for_are_read(tmp_path: Path) -> None:
    path = written(tmp_path / "v.csv", VTC + "0,a,1,1\n" * 5 + "this line is never read\n")
    assert len(read_trace(path, 5).rows) == 5


@pytest.mark.parametrize(
    ("text", "line", "sentence"),
    [
        ("a,b\n1,2\n", 1, "begins no trace known here"),
        (VTC + "0,a,1\n", 2, "4 columns were expected, there are 3"),
        (VTC + "0,a,1,1\n\n1,b,x,1\n", 4, "invalid literal"),
        (VTC + "0,a,0,1\n", 2, "prompt has 1 to"),
        (VTC + "0,a,1,-3\n", 2, "output has 1 to"),
        (VTC + "0,a,99999999999,1\n", 2, "prompt has 1 to"),
        (VTC + "nan,a,1,1\n", 2, "no time of arrival"),
        (VTC + "inf,a,1,1\n", 2, "no time of arrival"),
        (VTC + "5,a,1,1\n4,a,1,1\n", 3, "arrives before the line above"),
        (AZURE + "yesterday,1,1\n", 2, "Invalid isoformat"),
        (mooncake() + "{\n", 2, "Expecting"),
        (mooncake() + "[]\n", 2, "indices"),
        (mooncake() + json.dumps({"timestamp": 1}) + "\n", 2, "there is no 'hash_ids'"),
        (mooncake(hash_ids=[1]), 1, "cannot have 1 blocks of 512"),
        (mooncake(hash_ids=[1, "2"]), 1, "no block id"),
        (mooncake(hash_ids=3), 1, "not iterable"),
        (mooncake() + '{"timestamp": 1e999, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}', 2, "time"),
        (mooncake() + '{"hash_ids": ' + "[" * 100_000 + "\n", 2, "recursion"),
        (mooncake() + "\xff" * 3 + "\n", 2, "Expecting"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_line(tmp_path: Path, text: str, line: int, sentence: str) -> None:
    path = written(tmp_path / "trace", text)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert f"{path}, line {line}: " in str(caught.value)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (b"", "line 1: '' begins no trace"),
        (VTC.encode(), "there are no requests in it"),
        (VTC.encode() + b"0,\xff,1,1\n", "line 2: it is not UTF-8 text"),
    ],
)
def test_what_is_empty_or_no_text_is_refused(tmp_path: Path, raw: bytes, sentence: str) -> None:
    with pytest.raises(TraceError, match=sentence):
        read_trace(written(tmp_path / "trace.csv", raw))


def test_a_line_without_an_end_is_not_read_into_memory(tmp_path: Path) -> None:
    """Compressed, it is some hundred bytes; the reader stops at its bound."""
    path = written(tmp_path / "bomb.csv.gz", VTC + "0," + "a" * (traces.MAX_LINE + 10))
    with pytest.raises(TraceError, match=f"line 2: it is longer than {traces.MAX_LINE} bytes"):
        read_trace(path)


@pytest.mark.parametrize("damage", [lambda raw: raw[:-20], lambda raw: raw[:40] + b"\0" * 40, lambda raw: b"no gzip"])
def test_a_damaged_archive_is_refused(tmp_path: Path, damage: object) -> None:
    path = tmp_path / "t.csv.gz"
    path.write_bytes(damage(gzip.compress((VTC + "0,a,1,1\n" * 500).encode())))  # type: ignore[operator]
    with pytest.raises(TraceError, match=r"t\.csv\.gz"):
        read_trace(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(TraceError, match="Is a directory"):
        read_trace(tmp_path)


def test_a_folder_of_traces_says_which_one_it_lacks(tmp_path: Path) -> None:
    written(tmp_path / traces.PLACES["vtc"], VTC + "0,a,1,1\n")
    found = Traces(tmp_path)
    assert len(found.read("vtc").rows) == 1
    with pytest.raises(TraceMissingError, match="holds no azure2023/AzureLLMInferenceTrace_conv"):
        found.read("conv")


def test_a_single_file_stands_for_what_its_format_says(tmp_path: Path) -> None:
    found = Traces(written(tmp_path / "mine.csv", VTC + "0,a,1,1\n"))
    assert found.read("vtc").name == "mine"
    with pytest.raises(TraceMissingError, match="is not the trace it needs"):
        found.read("conv")


def test_without_a_path_every_trace_is_missing() -> None:
    with pytest.raises(TraceMissingError, match="--trace"):
        Traces(None).read("conv")


def test_the_public_traces_have_their_known_lengths(public_traces: Traces) -> None:
    """The golden facts of the traces' README."""
    for role, count in (("conv", 19_366), ("arxiv", 28_257), ("vtc", 1_500), ("mooncake_synthetic", 3_993)):
        assert len(public_traces.read(role).rows) == count
    assert len({row.client for row in public_traces.read("vtc").rows}) == 27
    conversation = public_traces.read("mooncake").rows
    assert len(conversation) == 12_031
    assert sum(row.prompt for row in conversation) / len(conversation) == pytest.approx(12_035.06, abs=0.01)
    assert sum(row.output for row in conversation) / len(conversation) == pytest.approx(342.62, abs=0.01)
