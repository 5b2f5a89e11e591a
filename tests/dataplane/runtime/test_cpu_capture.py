"""Programs recorded from every family: the same numbers as the eager model, in an arena whose columns are shared.

That a `forward` runs on symbols, which offer no operation at all, shows that it is written with those of the seam.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import numpy as np
import pytest
import torch
from torch import Tensor

from dataplane.kernels.packed import Format, Packed
from dataplane.kernels.program import Attend, Columns, Embed, Floats, Linear, Operation, Program, Softcap, Take
from dataplane.memory.kv_store import KVStore
from dataplane.models.loader import load_model
from dataplane.models.registry import Model
from dataplane.models.shape import ModelShape
from dataplane.runtime.attention import TorchAttention
from dataplane.runtime.cpu_capture import capture
from dataplane.runtime.input_batch import StepInput
from tests.dataplane.kernels.interpreter import Interpreter, Paged
from tests.factories.families import saved

VARIANTS = ("llama-biased", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi", "phi3")


class Plain:
    """A loaded model's own parameters, packed row by row."""

    def __init__(self) -> None:
        self.packed: dict[Tensor, Packed] = {}

    def matrix(self, parameter: Tensor) -> Packed:
        if parameter not in self.packed:
            rows, columns = parameter.shape
            values = parameter.numpy().reshape(-1).view(np.uint8)
            self.packed[parameter] = Packed(Format.FLOAT32, rows, columns, values, np.empty(0, np.uint8))
        return self.packed[parameter]

    def floats(self, tensor: Tensor) -> Floats:
        return tensor.numpy()


def unpack(packed: Packed) -> Floats:
    return packed.values.view(np.float32).reshape(packed.rows, packed.columns)


def step_of(lengths: list[tuple[int, int]], vocab: int) -> StepInput:
    """Requests of (tokens before, tokens now), decodes first, in blocks of 16 that are not in order."""
    generator = np.random.default_rng(5)
    starts, counts = (np.array(column, dtype=np.int64) for column in zip(*lengths, strict=True))
    width = -(-int((starts + counts).max()) // 16)
    tables = 1 + generator.permutation(len(lengths) * width).reshape(len(lengths), width)
    owner = np.repeat(np.arange(len(lengths)), counts)
    positions = np.concatenate([np.arange(start, start + count) for start, count in lengths])
    slots = tables[owner, positions // 16] * 16 + positions % 16
    return StepInput(
        request_ids=[str(index) for index in range(len(lengths))],
        rows=np.arange(len(lengths)),
        starts=starts,
        counts=counts,
        decodes=int((counts == 1).sum()),
        tables=tables,
        token_ids=torch.from_numpy(generator.integers(3, vocab, len(positions))),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(slots),
        sampled=[],
        sample_at=torch.empty(0, dtype=torch.int64),
        scored=[],
    )


@pytest.fixture(scope="module", params=VARIANTS)
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ModelShape, Model]]:
    folder, _ = saved(tmp_path_factory.mktemp(request.param), request.param)
    shape = ModelShape.read(folder)
    yield shape, load_model(folder, shape, positions=128, dtype=torch.float32, device=torch.device("cpu"))


def test_a_recorded_step_is_the_eager_one(loaded: tuple[ModelShape, Model]) -> None:
    """Decodes, a first chunk and a later one together, over keys that earlier steps left."""
    shape, model = loaded
    step = step_of([(40, 1), (7, 1), (0, 21), (19, 14)], shape.vocab)
    store = KVStore(shape, 64, 16)
    for tensor in (*store.keys, *store.values):
        tensor.normal_(generator=torch.Generator().manual_seed(3))
    size = (shape.kv_heads, -1, shape.head_dim)
    keys, values = ([tensor.view(size).numpy().copy() for tensor in of] for of in (store.keys, store.values))
    with torch.inference_mode():
        hidden = model(step.token_ids, step.positions, TorchAttention(store, shape.heads).plan(step))
        rows = torch.tensor([0, 1, 22, 36, 5])
        logits = model.logits(hidden[rows])

    body, head = capture(model, shape.hidden, Plain())
    paged = Paged(keys, values, 16, step.slots.numpy(), step.tables, step.starts, step.counts)
    ours = Interpreter(body, unpack, 50).body(step.token_ids.numpy(), step.positions.numpy(), paged)
    np.testing.assert_allclose(ours, hidden.numpy(), atol=1e-4)
    for layer, tensor in enumerate(store.keys):
        np.testing.assert_allclose(keys[layer], tensor.view(size).numpy(), atol=1e-4)
    assert logits.std() > 0.2
    np.testing.assert_allclose(Interpreter(head, unpack, 5).head(ours, rows.numpy()), logits.numpy(), atol=1e-4)


def columns_of(operation: Operation) -> dict[str, Columns]:
    found = {field.name: getattr(operation, field.name) for field in fields(operation)}
    return {name: value for name, value in found.items() if isinstance(value, Columns)}


def held(columns: Columns) -> set[int]:
    return set(range(columns.buffer, columns.buffer + columns.stride))


def test_values_share_columns_only_when_neither_is_needed_any_more(loaded: tuple[ModelShape, Model]) -> None:
    """From its writing to its last reading no other value is written over any column of a buffer."""
    shape, model = loaded
    body = capture(model, shape.hidden, Plain()).body
    owner: dict[int, Columns] = {}
    for operation in body.operations:
        named = columns_of(operation)
        out = named.pop("out")
        for columns in named.values():
            whole = columns._replace(at=0, width=columns.stride)
            assert columns.at >= 0 and columns.at + columns.width <= columns.stride
            assert {owner[column] for column in held(columns)} == {whole}
            assert not held(columns) & held(out)
        assert out.buffer % 16 == 0
        owner |= dict.fromkeys(held(out), out)
    assert body.out is not None
    assert {owner[column] for column in held(body.out)} == {body.out}
    everything = sum(columns_of(operation)["out"].width for operation in body.operations)
    assert max(owner) < body.width < everything / 3


def names(program: Program) -> list[str]:
    return [type(operation).__name__ for operation in program.operations]


def test_a_program_has_what_the_model_says_and_shares_tied_weights(loaded: tuple[ModelShape, Model]) -> None:
    shape, model = loaded
    body, head = capture(model, shape.hidden, Plain())
    assert names(body).count("Attend") == shape.layers
    assert names(body).count("Linear") == 4 * shape.layers
    assert [op.window for op in body.operations if isinstance(op, Attend)] == [
        shape.window(layer) for layer in range(shape.layers)
    ]
    capped = ["Softcap"] if shape.logit_softcap else []
    assert names(head) == ["Take", "Linear", *capped]
    take, product = head.operations[:2]
    assert isinstance(take, Take) and isinstance(product, Linear)
    assert product.out is None and head.out is None and head.out_width == product.weight.rows == shape.vocab
    if capped:
        last = head.operations[-1]
        assert isinstance(last, Softcap) and (last.out, last.x) == (None, None)
    first = body.operations[0]
    assert isinstance(first, Embed)
    assert (first.table is product.weight) == shape.tied_embeddings
