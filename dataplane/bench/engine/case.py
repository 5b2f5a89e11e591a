"""All that shapes a run, hashed; and which two runs may be compared.

Layer: service. Pure but for reading a checkpoint's bytes to hash them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from dataplane.bench.errors import CaseError

WEIGHTS = frozenset({".gguf", ".safetensors"})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCase:
    """What two runs must share to be compared, but for the one knob that was turned."""

    model: str
    checkpoint: str
    """SHA-256 of the weights' files."""
    hardware: Mapping[str, Any]
    """CPU's name and the cores that each side has."""
    threads: int
    ranks: int = 1
    dtype: Mapping[str, str]
    """Weights, activations and KV by side."""
    lengths: Mapping[str, Any]
    """Prompt and output tokens by workload."""
    arrival: Mapping[str, Any]
    """How requests come, by workload."""
    flags: Mapping[str, Any]
    """How each side was started: the engine's own flags, a peer's version and setup."""
    pairs: int
    quick: bool
    seed: int
    targets: Mapping[str, float] = field(default_factory=dict)
    """Objectives on the figures; the bench itself has none."""

    def document(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @property
    def sha256(self) -> str:
        return case_hash(self.document())


def case_hash(document: Mapping[str, Any]) -> str:
    """SHA-256 of the case as canonical JSON: keys sorted, no spaces."""
    return hashlib.sha256(msgspec.json.encode(dict(document), order="sorted")).hexdigest()


def require_same_case(old: Mapping[str, Any], new: Mapping[str, Any], knob: str) -> None:
    """Raises CaseError unless the two cases are the same but for `knob`, a dotted path such as `flags.tidegate`, and
    what lies below it; "" allows no difference."""
    turned = {path for path in differences(old, new) if not (knob and (path == knob or path.startswith(f"{knob}.")))}
    if turned:
        allowed = f"more than {knob}" if knob else "their cases"
        raise CaseError(f"the two results differ in {allowed}: {', '.join(sorted(turned))}")


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted paths at which the two differ."""
    found: list[str] = []
    for name in sorted({*old, *new}):
        path = f"{prefix}{name}"
        one, other = old.get(name), new.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            found += differences(one, other, f"{path}.")
        elif one != other or (name in old) != (name in new):
            found.append(path)
    return found


def checkpoint_hash(model: Path) -> str:
    """SHA-256 over the weights' files of `model`, in the order of their names."""
    files = [model] if model.is_file() else sorted(path for path in model.iterdir() if path.suffix in WEIGHTS)
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
