"""The families there are: each has a class, and the documentation names them and no other."""

from __future__ import annotations

import re
from pathlib import Path

from dataplane.models.families import GGUF, HUGGING_FACE
from dataplane.models.gguf_file import SUPPORTED
from dataplane.models.registry import FAMILIES

DOCS = Path(__file__).parents[3] / "docs" / "models.md"


def test_every_spelling_leads_to_a_class() -> None:
    assert set(HUGGING_FACE.values()) | set(GGUF.values()) == set(FAMILIES)


def test_the_documentation_names_what_there_is() -> None:
    text = DOCS.read_text()
    rows = re.findall(r"^\| .+? \| `(\w+)` \| `(\w+)` \|", text, flags=re.MULTILINE)
    assert {row[0] for row in rows} == set(HUGGING_FACE)
    assert {row[1] for row in rows} == set(GGUF)
    assert {HUGGING_FACE[one] for one, _ in rows} == set(FAMILIES)
    assert all(GGUF[two] in (HUGGING_FACE[one], "llama") for one, two in rows)
    formats = text.partition("GGUF versions 2 and 3 with tensors in")[2].partition("made float32")[0]
    assert set(re.findall(r"[A-Z]+\d\w*", formats)) == {kind.name for kind in SUPPORTED}
