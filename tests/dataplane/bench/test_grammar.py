"""The grammar bench tells good libraries from bad ones: a walker that allows everything is found out."""

from __future__ import annotations

from pathlib import Path

from dataplane.bench.grammar import Case, cases, measure, run
from dataplane.config import find_model
from dataplane.decoding.grammar import Mask
from dataplane.protocol import Grammar, GrammarKind
from tests.dataplane.replica.harness import smollm2_tokenizer


def test_the_engines_own_library_keeps_to_every_case_it_takes(tmp_path: Path) -> None:
    report = run(find_model("smollm2")[0], only="regex")
    rows = [row for row in report.results["grammars"] if row["library"] == "llguidance"]
    assert {row["case"] for row in rows} == {case.name for case in cases() if "regex" in case.name}
    assert {row["outcome"] for row in rows} == {"ok"}
    assert all(row["mask_us"] > 0 and row["compile_ms"] > 0 for row in rows)


class Lax:
    """Allows everything."""

    complete = True

    def fill(self, mask: Mask) -> None:
        mask[:] = -1

    def accept(self, token: int) -> bool:
        return True


def test_what_a_library_gets_wrong_is_said() -> None:
    case = Case("digits", GrammarKind.REGEX, "[0-9]+", "123", "abc")

    def refuse(grammar: Grammar) -> Lax:
        raise ValueError("no")

    class Mute(Lax):
        def accept(self, token: int) -> bool:
            return False

    outcomes = [measure(start, smollm2_tokenizer(), case) for start in (lambda _: Lax(), lambda _: Mute(), refuse)]
    assert [row["outcome"] for row in outcomes] == ["accepts what it should not", "rejects its own text", "refused"]
    assert outcomes[2]["said"] == "no"
