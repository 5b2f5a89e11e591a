"""Which tests prove which of the failures that this product owes an answer to; written to docs/failures.md.

A test names the lines it covers: `test_f12_…`, or `test_f1_f13_…` for two. `python -m tests.failures` writes the page
anew; `test_failures.py` finds one that is not what the tests say.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "failures.md"
LABELLED = re.compile(r"^test((?:_f[0-9]+)+)_(.+)$")

OWED = {
    1: "However many gateways, no window admits more than its limit (plus the published bound).",
    2: "Of many at once with room for one, exactly one passes; no balance falls below zero.",
    3: "No path can dispatch without a lease.",
    4: "What remains falls at admission and rises at settlement by what was not used.",
    5: "Every limit that is shown is enforced, and says when that was last proven.",
    6: "Every inference endpoint is metered.",
    7: "A request is settled to what the engine produced; each ledger row says on what basis.",
    8: "One ledger: sums by key, by model and by tenant agree.",
    9: "Windows are right in every zone, through both changes of the clock and leap days.",
    10: "A rotated key keeps identity and window; both keys are valid in grace; a repeat is harmless.",
    11: "Waiting exactly as long as a refusal says makes the same request pass.",
    12: "Whatever is cancelled, whenever: what it held is free, by its lease's time at the latest.",
    13: "A cap on concurrency holds across processes.",
    14: "While Redis is away each limit does what it declares, within its bound, and says so.",
    15: "While Postgres is away no valid key is refused, inference goes on and nothing of the ledger is lost.",
    16: "A revoked key is refused everywhere within two seconds.",
    17: "A change of configuration reaches every gateway and replica; skew is shown; one step leads back.",
    18: "What clients do wrong never counts against a replica; retries are a tenth of the traffic at most.",
    19: "Stale metrics stop no traffic, and are shown as stale.",
    20: "Fewer replicas cut no stream.",
    21: "Noise changes no number of replicas; nor does idleness.",
    22: "One bad reporter is left out with a reason; the others still count.",
    23: "Whose limit applies is the key's to say; forged headers are dropped and counted.",
    24: "Refusals are quick; the lowest band goes first; everybody keeps a weighted part.",
    25: "Time to first token is to the first of any kind and to the first visible one, apart.",
    26: "Time per output token does not depend on how tokens were chunked.",
    27: "What is too large for a histogram is said to be, and never a number.",
    28: "Counters only rise, through restarts and several workers.",
    29: "Prefix hits of first attempts and of recomputation are told apart.",
    30: "A metric that an engine renamed is reported, and breaks no page.",
    31: "Pages stay quick over a very large ledger.",
    32: "Metrics need authentication; their labels are values that are registered.",
    33: "No secret reaches a log, a trace or a report.",
    34: "No address that a tenant or replica names leads inside.",
    35: "One delivery for each alert, whatever restarts.",
    36: "No list shows one tenant another's rows.",
    37: "A stream that its browser left leaves nothing behind.",
    38: "A job that comes twice works once; an older plan replaces none.",
    39: "Two schedulers fire each job once.",
    40: "Streams are relayed byte for byte, wherever the network splits them.",
}  # fmt: skip


class Proof(NamedTuple):
    """One test: its file below tests/, what its name says, and whether it is marked slow."""

    file: str
    says: str
    slow: bool


Function = tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]


def functions() -> Iterator[Function]:
    """Every test function and its file, in order."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                yield path, node


def labels_of(name: str) -> list[int]:
    """The lines that a test's name covers."""
    found = LABELLED.match(name)
    return [int(label) for label in found[1].split("_f")[1:]] if found else []


def proofs(of: Iterable[Function]) -> dict[int, list[Proof]]:
    """By line. One that no test names has none."""
    found: dict[int, list[Proof]] = {label: [] for label in OWED}
    for path, node in of:
        slow = any(ast.unparse(each) == "pytest.mark.slow" for each in node.decorator_list)
        for label in labels_of(node.name):
            says = LABELLED.sub(r"\2", node.name).replace("_", " ")
            found[label].append(Proof(path.relative_to(TESTS).as_posix(), says, slow))
    return found


def page(found: Mapping[int, Sequence[Proof]]) -> str:
    """docs/failures.md as the tests say it is."""
    lines = [
        "# Failures it is built against, and their proofs",
        "",
        "Each line is a way in which systems like this one fail their users, turned into what is owed. Tests carry the",
        "line's label in their names: `pytest -k 'F12 or F15'` runs those of two lines (`F1` also finds F10 to F19),",
        "with `-m ''` the slow ones too. Written by `python -m tests.failures`.",
        "",
        "| | Owed | Tests |",
        "|---|---|---|",
    ]
    lines += [
        f"| {f'[F{label}](#f{label})' if found[label] else f'F{label}'} | {owed} | {len(found[label]) or 'none yet'} |"
        for label, owed in OWED.items()
    ]
    for label, tests in found.items():
        if tests:
            lines += ["", f"## F{label}", "", "| Test | In `tests/` |", "|---|---|"]
            lines += [f"| {each.says}{' (slow)' if each.slow else ''} | `{each.file}` |" for each in tests]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(proofs(functions())), "utf-8")
