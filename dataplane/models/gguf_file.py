"""Reads a GGUF file: metadata, tensor directory, raw tensor bytes.

Layer: model algorithm. Torch-free, so that the tokenizer can read the same file in a process without torch.
It checks every length against the file before it reads, and never returns data from a damaged file.
Format: ggml `docs/gguf.md`, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from dataplane.errors import CheckpointError

MAGIC = b"GGUF"
STRING, ARRAY = 8, 9
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
SUPPORTED = frozenset(
    GGMLQuantizationType[name]
    for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
)
FLOAT_KINDS = frozenset(GGMLQuantizationType[name] for name in ("F32", "F16", "BF16"))
"""Types without blocks."""
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
"""ggml's own bound."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of the tensor directory. `shape` is row-major (ggml's dimensions reversed); `offset` is in the file."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    nbytes: int


class _Cursor:
    """Reads forward through a mapped file and refuses to read past its end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0

    def take(self, size: int) -> bytes:
        if size < 0 or self.at + size > len(self.data):
            raise CheckpointError(f"{self.path.name} is truncated or damaged: its header ends after {self.at} bytes")
        start, self.at = self.at, self.at + size
        return self.data[start : self.at]

    def scalar(self, kind: int) -> Any:
        form = SCALARS.get(kind)
        if form is None:
            raise CheckpointError(f"{self.path.name} is damaged: unknown metadata type {kind} at byte {self.at}")
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def u32(self) -> int:
        return int(self.scalar(4))

    def u64(self) -> int:
        return int(self.scalar(10))

    def text(self) -> str:
        return self.take(self.u64()).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.scalar(kind)
        item, count = self.u32(), self.u64()
        if item in SCALARS:
            form = SCALARS[item]
            raw = self.take(count * struct.calcsize(form))
            return list(struct.unpack(f"<{count}{form[1]}", raw))
        if item != STRING:
            raise CheckpointError(f"{self.path.name} is damaged: unknown array type {item} at byte {self.at}")
        return [self.text() for _ in range(count)]


class GGUFFile:
    """An open GGUF file: `metadata` by key, `tensors` by name, `read` and `raw` for one tensor."""

    def __init__(self, path: Path, data: mmap.mmap, metadata: dict[str, Any], tensors: dict[str, TensorInfo]) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self._data = data

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map the file and read its header. Raises CheckpointError for anything that is not a whole GGUF file."""
        try:
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        cursor = _Cursor(data, path)
        if cursor.take(4) != MAGIC:
            raise CheckpointError(f"{path.name} is not a GGUF file")
        version = cursor.u32()
        if version not in (2, 3):
            raise CheckpointError(f"{path.name} is GGUF version {version}; versions 2 and 3 are supported")
        tensor_count, key_count = cursor.u64(), cursor.u64()
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = cursor.text()
            if key in metadata:
                raise CheckpointError(f"{path.name} is damaged: it has the key {key} twice")
            metadata[key] = cursor.value(cursor.u32())
        entries = [_read_entry(cursor) for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{path.name} is damaged: its alignment is {alignment!r}")
        base = -(-cursor.at // alignment) * alignment
        placed = [_placed(entry, base, alignment, len(data), path) for entry in entries]
        _refuse_sharing(placed, path)
        return cls(path, data, metadata, {entry.name: entry for entry in placed})

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The bytes of tensor `name` as they lie in the file, [rows, bytes of a row]; not to be written to."""
        info = self.tensors[name]
        block, size = GGML_QUANT_SIZES[info.kind]
        raw = np.frombuffer(self._data, dtype=np.uint8, count=info.nbytes, offset=info.offset)
        return raw.reshape(-1, info.shape[-1] // block * size)

    def read(self, name: str) -> NDArray[np.float32]:
        """Tensor `name`, dequantised to float32, in its row-major shape."""
        info = self.tensors[name]
        return np.asarray(dequantize(self.raw(name), info.kind), dtype=np.float32).reshape(info.shape)


def _read_entry(cursor: _Cursor) -> TensorInfo:
    name = cursor.text()
    rank = cursor.u32()
    if rank > MAX_DIMENSIONS:
        raise CheckpointError(f"{cursor.path.name} is damaged: tensor {name} has {rank} dimensions")
    dimensions = tuple(cursor.u64() for _ in range(rank))
    kind_id, offset = cursor.u32(), cursor.u64()
    try:
        kind = GGMLQuantizationType(kind_id)
    except ValueError as error:
        raise CheckpointError(f"{cursor.path.name}: tensor {name} has the unknown type {kind_id}") from error
    if kind not in SUPPORTED:
        known = ", ".join(sorted(member.name for member in SUPPORTED))
        raise CheckpointError(f"{cursor.path.name}: tensor {name} is {kind.name}; supported types are {known}")
    block, size = GGML_QUANT_SIZES[kind]
    shape = dimensions[::-1]
    if not shape or min(shape) <= 0 or shape[-1] % block:
        raise CheckpointError(f"{cursor.path.name}: tensor {name} of type {kind.name} has the impossible shape {shape}")
    count = 1
    for extent in shape:
        count *= extent
    return TensorInfo(name, shape, kind, offset, count // block * size)


def _placed(entry: TensorInfo, base: int, alignment: int, file_size: int, path: Path) -> TensorInfo:
    start = base + entry.offset
    if entry.offset % alignment:
        raise CheckpointError(f"{path.name} is damaged: tensor {entry.name} begins at {entry.offset}, unaligned")
    if start + entry.nbytes > file_size:
        raise CheckpointError(
            f"{path.name} is truncated: tensor {entry.name} ends at byte {start + entry.nbytes}, "
            f"the file at {file_size}"
        )
    return TensorInfo(entry.name, entry.shape, entry.kind, start, entry.nbytes)


def _refuse_sharing(tensors: list[TensorInfo], path: Path) -> None:
    """No two entries have one name, and none shares a byte with another."""
    names = {entry.name for entry in tensors}
    if len(names) != len(tensors):
        raise CheckpointError(f"{path.name} is damaged: it has {len(tensors)} tensors of {len(names)} names")
    for before, after in pairwise(sorted(tensors, key=lambda entry: entry.offset)):
        if before.offset + before.nbytes > after.offset:
            raise CheckpointError(f"{path.name} is damaged: tensors {before.name} and {after.name} overlap")
