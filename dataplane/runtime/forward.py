"""How a planned step's numbers are made: the interface between the runner and a network, and its eager form.

Layer: kernel and runtime. The runner says which tokens and which rows; a `Forward` owns the weights and answers with
logits. Planning is apart from running so that an executor may capture once and replay: what `plan` finds (a bucket, a
graph, arrays of inputs) belongs to one step, and `run` does nothing that depends on what the step is about.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from dataplane.kernels.ops import Attention
from dataplane.models.registry import Model
from dataplane.models.weight_format import WeightFormat
from dataplane.runtime.attention import AttentionBackend
from dataplane.runtime.input_batch import StepInput


@dataclass(frozen=True, slots=True)
class ForwardFacts:
    """What runs, for reports."""

    kind: str
    """eager or captured."""
    attention: str
    """The attention backend's name."""
    tier: str
    """The instruction set that kernels were chosen for; empty where torch chooses."""
    weights: WeightFormat
    weight_bytes: int
    """Bytes of all weights, those shared between embedding and head counted once."""
    head_bytes: int
    """Bytes that a product with the head reads."""
    embedding_bytes: int
    """Bytes of an embedding that is not the head: looked up, never read as a whole."""

    def step_bytes(self, *, sampled: int) -> int:
        """Bytes of weights that a step must read: those of the layers, and the head where a row is sampled."""
        body = self.weight_bytes - self.head_bytes - self.embedding_bytes
        return body + (self.head_bytes if sampled else 0)


class PlannedStep(Protocol):
    """One step, ready to run. What it answers may be gone when the next step of the same `Forward` runs."""

    def run(self) -> None:
        """Compute the hidden states of the step's tokens, and store their keys and values."""

    def logits(self, rows: Tensor) -> Tensor:
        """Logits [R, vocab] in float32 of the tokens at `rows` [R] of the step, which has run.

        The caller may write to them; they are gone when the next are asked for.
        """


class Forward(Protocol):
    """A network with its weights, over the KV tensors of one rank."""

    facts: ForwardFacts

    def plan(self, step: StepInput) -> PlannedStep:
        """Everything about `step` that can be found before it runs."""

    def close(self) -> None:
        """Give up threads and buffers. Nothing may be planned after it."""


class EagerForward:
    """A torch module, called as it is."""

    def __init__(self, model: Model, attention: AttentionBackend) -> None:
        self.model, self._attention = model, attention
        places = model.weights()
        head = places.get("lm_head.weight")
        embedding = places["model.embed_tokens.weight"]
        storages = {place.untyped_storage().data_ptr(): place.untyped_storage() for place in places.values()}
        self.facts = ForwardFacts(
            kind="eager",
            attention=attention.name,
            tier="",
            weights=WeightFormat.FLOAT32,
            weight_bytes=sum(storage.nbytes() for storage in storages.values()),
            head_bytes=(embedding if head is None else head).nbytes,
            embedding_bytes=0 if head is None else embedding.nbytes,
        )

    def plan(self, step: StepInput) -> PlannedStep:
        with torch.inference_mode():
            return _EagerStep(self.model, step, self._attention.plan(step))

    def close(self) -> None:
        """Torch's threads are the process's."""


class _EagerStep:
    def __init__(self, model: Model, step: StepInput, attention: Attention) -> None:
        self._model, self._step, self._attention = model, step, attention
        self._hidden: Tensor | None = None

    def run(self) -> None:
        with torch.inference_mode():
            self._hidden = self._model(self._step.token_ids, self._step.positions, self._attention)

    def logits(self, rows: Tensor) -> Tensor:
        with torch.inference_mode():
            return self._model.logits(cast(Tensor, self._hidden)[rows]).float()
