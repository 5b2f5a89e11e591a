"""Which matrices four bits are kept from, under every name that the families give them."""

from __future__ import annotations

import pytest

from dataplane.kernels.packed import Format
from dataplane.models.weight_format import WeightFormat, packed_format

FOUR = ["self_attn.o_proj", "self_attn.dense", "mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj", "mlp.fc1"]
EIGHT = [f"self_attn.{part}_proj" for part in ("q", "k", "v", "qkv")] + ["mlp.down_proj", "mlp.fc2"]


@pytest.mark.parametrize("name", [f"model.layers.0.{name}.weight" for name in FOUR])
def test_int4_has_four_bits_where_they_do_least_harm(name: str) -> None:
    assert packed_format(WeightFormat.INT4, name) is Format.UINT4


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "lm_head.weight", *(f"model.layers.0.{name}.weight" for name in EIGHT)]
)
def test_int4_keeps_the_others_in_eight(name: str) -> None:
    assert packed_format(WeightFormat.INT4, name) is Format.INT8
