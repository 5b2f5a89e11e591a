"""Public traces as rows of arrival, prompt and output lengths.

Layer: service. It reads files in place, plain or gzip, a line at a time and within bounds; it ships none of them and
makes nothing up. Sources: Mooncake FAST'25 (conversation, synthetic), Azure 2023 (Splitwise), the VTC artifact, Vidur's
arXiv lengths. What a trace does not hold (arrivals, clients, prefix blocks) is absent from its rows.
"""

from __future__ import annotations

import enum
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from gzip import GzipFile
from io import BufferedReader
from pathlib import Path

MAX_ROWS = 1_000_000
MAX_LINE = 1 << 20
"""Bytes of one line; Mooncake's longest has about 2,000."""
MAX_TOKENS = 10_000_000
"""Tokens of one prompt or output."""
MOONCAKE_BLOCK = 512
"""Tokens that one of Mooncake's hash ids stands for."""


class TraceError(ValueError):
    """A trace cannot be read: the sentence names file and line."""


class TraceMissingError(TraceError):
    """There is no such trace where it was looked for."""


class TraceKind(enum.StrEnum):
    """Whose format a file has."""

    MOONCAKE = "mooncake"
    AZURE = "azure2023"
    VTC = "vtc"
    VIDUR = "vidur"


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request: seconds since the trace began (0 where it has no times), and its lengths in tokens.

    `blocks` are ids of blocks of `MOONCAKE_BLOCK` tokens, each of which stands for all of the prompt up to its end.
    """

    arrival: float
    prompt: int
    output: int
    client: str = ""
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    kind: TraceKind
    rows: tuple[TraceRow, ...]


HEADERS = {
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): TraceKind.AZURE,
    ("req_time_s", "client", "prompt_len", "output_len"): TraceKind.VTC,
    ("num_prefill_tokens", "num_decode_tokens", "num_total_tokens", "pd_ratio"): TraceKind.VIDUR,
}
PLACES = {
    "conv": "azure2023/AzureLLMInferenceTrace_conv.csv.gz",
    "arxiv": "vidur/arxiv_summarization_llama2.csv.gz",
    "vtc": "vtc/real_trace.csv",
    "mooncake": "mooncake/conversation_trace.jsonl.gz",
    "mooncake_synthetic": "mooncake/synthetic_trace.jsonl.gz",
}
"""Where each trace lies in a folder of traces."""
ROLES = {
    TraceKind.AZURE: ("conv",),
    TraceKind.VIDUR: ("arxiv",),
    TraceKind.VTC: ("vtc",),
    TraceKind.MOONCAKE: ("mooncake", "mooncake_synthetic"),
}
"""For what a single file may be taken."""


class Traces:
    """The traces at a path: a folder laid out as in `PLACES`, one file of any known kind, or none at all.

    Raises TraceError at once when the path is neither.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._roles: tuple[str, ...] = ()
        if path is not None and not path.is_dir():
            self._roles = ROLES[read_trace(path, 1).kind]

    def read(self, role: str, limit: int = MAX_ROWS) -> Trace:
        """The first `limit` rows of a trace. Raises TraceMissingError if it is not there."""
        if self._path is None:
            raise TraceMissingError("no traces were given (--trace)")
        if self._roles:
            if role not in self._roles:
                raise TraceMissingError(f"{self._path} is not the trace it needs, {PLACES[role]}")
            return read_trace(self._path, limit)
        if not (self._path / PLACES[role]).is_file():
            raise TraceMissingError(f"{self._path} holds no {PLACES[role]}")
        return read_trace(self._path / PLACES[role], limit)


def read_trace(path: Path, limit: int = MAX_ROWS) -> Trace:
    """The first `limit` rows of a file, its kind told by its first line.

    Raises TraceError for a file that cannot be read, is of no known kind, holds no rows or a row that is not valid.
    """
    rows: list[TraceRow] = []
    try:
        with _open(path) as file:
            lines = _lines(path, file)
            number, first = next(lines, (1, ""))
            kind = TraceKind.MOONCAKE if first.startswith("{") else _kind(path, first)
            parse = _PARSERS[kind]
            if kind is TraceKind.MOONCAKE:
                _append(rows, path, number, first, parse)
            for number, line in lines:
                if len(rows) >= min(limit, MAX_ROWS):
                    break
                _append(rows, path, number, line, parse)
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if not rows:
        raise TraceError(f"{path}: there are no requests in it")
    began = rows[0].arrival
    shifted = (TraceRow(row.arrival - began, row.prompt, row.output, row.client, row.blocks) for row in rows)
    return Trace(path.name.split(".")[0], kind, tuple(shifted))


def _open(path: Path) -> BufferedReader | GzipFile:
    return GzipFile(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _lines(path: Path, file: BufferedReader | GzipFile) -> Iterator[tuple[int, str]]:
    """Line numbers and lines, empty ones left out; no more than one line is held at a time."""
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise TraceError(f"{path}, line {number}: it is longer than {MAX_LINE} bytes")
        try:
            text = line.decode().strip()
        except UnicodeDecodeError:
            raise TraceError(f"{path}, line {number}: it is not UTF-8 text") from None
        if text:
            yield number, text


def _kind(path: Path, header: str) -> TraceKind:
    kind = HEADERS.get(tuple(header.split(",")))
    if kind is None:
        raise TraceError(f"{path}, line 1: {header[:80]!r} begins no trace known here ({', '.join(TraceKind)})")
    return kind


def _append(rows: list[TraceRow], path: Path, number: int, line: str, parse: Callable[[str], TraceRow]) -> None:
    try:
        row = parse(line)
        _check(row, rows[-1].arrival if rows else 0.0)
    except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        what = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise TraceError(f"{path}, line {number}: {what}") from None
    rows.append(row)


def _check(row: TraceRow, before: float) -> None:
    """`before` is the arrival of the row above it."""
    for name, tokens in (("prompt", row.prompt), ("output", row.output)):
        if not 1 <= tokens <= MAX_TOKENS:
            raise ValueError(f"a request's {name} has 1 to {MAX_TOKENS} tokens, not {tokens}")
    if not 0 <= row.arrival < float("inf"):
        raise ValueError(f"{row.arrival} is no time of arrival")
    if row.arrival < before:
        raise ValueError("it arrives before the line above it")
    if row.blocks and len(row.blocks) != -(-row.prompt // MOONCAKE_BLOCK):
        raise ValueError(f"a prompt of {row.prompt} tokens cannot have {len(row.blocks)} blocks of {MOONCAKE_BLOCK}")


def _fields(line: str, count: int) -> list[str]:
    fields = line.split(",")
    if len(fields) != count:
        raise ValueError(f"{count} columns were expected, there are {len(fields)}")
    return fields


def _mooncake(line: str) -> TraceRow:
    """Times are in milliseconds."""
    row = json.loads(line)
    blocks = row["hash_ids"]
    if not all(type(block) is int and block >= 0 for block in blocks):
        raise ValueError("hash_ids holds something that is no block id")
    return TraceRow(
        float(row["timestamp"]) / 1000, int(row["input_length"]), int(row["output_length"]), blocks=tuple(blocks)
    )


def _azure(line: str) -> TraceRow:
    """Times have seven decimals."""
    when, prompt, output = _fields(line, 3)
    return TraceRow(datetime.fromisoformat(when + "+00:00").timestamp(), int(prompt), int(output))


def _vtc(line: str) -> TraceRow:
    when, client, prompt, output = _fields(line, 4)
    return TraceRow(float(when), int(prompt), int(output), client)


def _vidur(line: str) -> TraceRow:
    """Lengths only."""
    prompt, output, _, _ = _fields(line, 4)
    return TraceRow(0.0, int(prompt), int(output))


_PARSERS: dict[TraceKind, Callable[[str], TraceRow]] = {
    TraceKind.MOONCAKE: _mooncake,
    TraceKind.AZURE: _azure,
    TraceKind.VTC: _vtc,
    TraceKind.VIDUR: _vidur,
}
