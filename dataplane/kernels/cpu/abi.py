"""The structs of `source/abi.h`, field by field.

Layer: kernel. Every integer is 64 bits wide and every pointer an address; who fills them keeps what they point to.
"""

from __future__ import annotations

import ctypes

from dataplane.kernels import program as ir

KINDS: dict[type, int] = {
    kind: number
    for number, kind in enumerate(
        (
            ir.Embed,
            ir.Take,
            ir.Linear,
            ir.Add,
            ir.Scale,
            ir.Softcap,
            ir.RmsNorm,
            ir.LayerNorm,
            ir.Rotate,
            ir.SiluMul,
            ir.GeluTanhMul,
            ir.GeluTanh,
            ir.Attend,
        )
    )
}


def _struct(name: str, fields: str) -> type[ctypes.Structure]:
    """`fields` as words: a name is an integer, *name an address, ~name a double, name:Type a struct made before."""
    kinds: list[tuple[str, type]] = []
    for field in fields.split():
        plain, _, kind = field.lstrip("*~").partition(":")
        if kind:
            kinds.append((plain, {"Columns": Columns, "Matrix": Matrix}[kind]))
        elif field.startswith("~"):
            kinds.append((plain, ctypes.c_double))
        else:
            kinds.append((plain, ctypes.c_void_p if field.startswith("*") else ctypes.c_int64))
    return type(name, (ctypes.Structure,), {"_fields_": kinds})


Columns = _struct("Columns", "buffer stride at width")
Matrix = _struct("Matrix", "format rows columns minima *values *scales")
Operation = _struct(
    "Operation",
    "kind out:Columns x:Columns y:Columns z:Columns weight:Matrix *a *b size turned layer window ~factor ~cap",
)
Inputs = _struct(
    "Inputs",
    "n n_max *arena *ids *positions *keys *values blocks block_size head_dim *slots *tables table_width requests "
    "*starts *counts *source source_stride *rows *output output_width",
)
