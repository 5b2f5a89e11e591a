"""What a prefix hit saves, and what it does not.

Layer: hardware. Pure. Formulas of DOMAIN 3.3, derived there; Amdahl's bound (1967) is 3.4. A hit removes prefill
work: it shortens TTFT and frees prefill's share of the device. The keys of the hit are still read by every later
token, so TPOT is never credited: no function here returns one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


def hit_tokens(matched: int, prompt: int, block_size: int) -> int:
    """Tokens a match of `matched` saves: whole blocks, and at least the last prompt token is computed."""
    return block_size * (max(0, min(matched, prompt - 1)) // block_size)


def area_saved(ratio: float, kappa: float) -> float:
    """S = (ρ + κ·ρ²) / (1 + κ): share of prefill's FLOPs that a hit of the ratio ρ = h/N removes.

    κ is causal attention's FLOPs over those of the linear layers for the whole prompt: `Geometry.kappa_per_token` · N.
    """
    if not 0.0 <= ratio <= 1.0:
        raise ValueError(f"a hit ratio lies between 0 and 1, not at {ratio}")
    return (ratio + kappa * ratio * ratio) / (1.0 + kappa)


@dataclass(frozen=True, slots=True)
class TraceSaving:
    """A whole trace's hits: Σh / ΣN of the linear work, Σh² / ΣN² of the attention."""

    linear: float
    attention: float


def trace_saving(hits: Iterable[tuple[int, int]]) -> TraceSaving:
    """Over (cached, prompt) pairs. Raises ValueError for none."""
    cached = prompt = cached_area = prompt_area = 0
    for h, n in hits:
        cached, prompt = cached + h, prompt + n
        cached_area, prompt_area = cached_area + h * h, prompt_area + n * n
    if not prompt:
        raise ValueError("a trace without prompt tokens saves nothing")
    return TraceSaving(cached / prompt, cached_area / prompt_area)


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Where the time to a first token goes, in seconds, when nothing is cached.

    `fixed` is the part of a prefill that no hit shortens (T_0: weights read, launches, sampling), `prefill` all of it.
    """

    prefill: float
    fixed: float = 0.0
    queue: float = 0.0
    tokenize: float = 0.0
    network: float = 0.0

    def at(self, saved: float, *, load: float = 0.0) -> float:
        """TTFT = T_q + T_tok + T_0 + (T_pre(N) − T_0)(1 − S) + T_load + T_net, `saved` being S.

        `load` is the time to bring the hit's KV to the device. T_q is passed as it is under this load: with hits the
        server is less busy, and the queue formulas give a shorter one for the shortened service times.
        """
        computed = self.fixed + (self.prefill - self.fixed) * (1.0 - saved)
        return self.queue + self.tokenize + computed + load + self.network


def capacity_gain(prefill_share: float, saved: float) -> float:
    """Tokens per minute gain 1 / (1 − f_p·S), f_p being prefill's share of busy time; TPOT stays as it is.

    It is Amdahl's law with prefill made 1 / (1 − S) times as fast; `amdahl_bound` is where it ends.
    """
    if not 0.0 <= prefill_share <= 1.0 or not 0.0 <= saved <= 1.0:
        raise ValueError(f"shares lie between 0 and 1: prefill {prefill_share}, saved {saved}")
    spared = prefill_share * saved
    return 1.0 / (1.0 - spared) if spared < 1.0 else float("inf")


def amdahl_bound(part: float) -> float:
    """1 / (1 − p): what a part of the time can give the whole at most, however fast it becomes."""
    return 1.0 / (1.0 - part) if part < 1.0 else float("inf")


def worth_loading(prefix: int, hidden: int, kv_bytes_each: float, group: int, flops_per_s: float) -> float:
    """Bytes/s of a link above which loading a cached prefix beats computing it (Mooncake, Qin et al. 2024, eq. 2).

    B / G > 2·d·s / (gqa·(a·p·d + b·d²)), with a = 4 and b = 22 for a Llama layer; `group` is query heads per key head.
    """
    work = group * (4.0 * prefix * hidden + 22.0 * hidden * hidden)
    return flops_per_s * 2.0 * hidden * kv_bytes_each / work
