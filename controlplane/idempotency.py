"""Telling a repeated creation from another one under the same idempotency key.

Layer: service. Pure. A repeat that asks for what the row has is answered with that row; whatever asks for something
else must not pass for a success.
"""

from __future__ import annotations

from collections.abc import Mapping

from controlplane.errors import ConflictError


def check_repeat(made: str, asked: Mapping[str, tuple[object, object]]) -> None:
    """`asked` has for each parameter what is asked for and what the row has that this idempotency key made.

    Raises ConflictError naming the first parameter that differs; `made` says which row that is.
    """
    for param, (wanted, has) in asked.items():
        if wanted != has:
            raise ConflictError(
                f"this idempotency key already made {made}, whose {param} is not what this request asks for",
                code="idempotency_mismatch",
                param=param,
            )
