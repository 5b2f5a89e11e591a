"""`tidegate bench fairness`: who gets how much of a busy pool through four gateways, and what that costs.

Layer: service. Beside each figure stands its control in the same run: the same load by arrival, where the engine holds
all that comes; the same flood of long prompts through a gateway without a lane for them; short prompts alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from controlplane.admission.fair_queue import FLUSH_S
from controlplane.lab.bench.batching_engine import Speed
from controlplane.lab.bench.fair_deployment import GATEWAYS, REPLICAS, UNBOUNDED, FairDeployment
from controlplane.lab.bench.fair_load import CHARGES, Ask, Heard, Load, largest_gap, vtc_bound
from controlplane.lab.bench.quantiles import quantile
from controlplane.lab.bench.report import Report, Section, Table

SPEED = Speed(step_s=0.04, token_s=4e-5, budget=512, slots=4)
WEIGHTS = (1.0, 3.0)
PROMPT, OUTPUT = 100, 40
POLITE_PROMPT, POLITE_OUTPUT, POLITE_EVERY_S = 20, 10, 0.5
POLITE_FLOOR = (POLITE_PROMPT + POLITE_OUTPUT) / POLITE_EVERY_S
LONG_PROMPT, LONG_OUTPUT = 24_000, 4
SHORT_PROMPT, SHORT_OUTPUT, SHORT_EVERY_S = 50, 4, 0.2
AT_ONCE = 6
"""Requests that a flooding tenant keeps at each gateway: more than its part of the slots."""
LONG_AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class FairnessCase:
    """All that shapes a run. `quick` makes it short: the directions stay, the figures are rough."""

    seed: int = 0
    quick: bool = False

    @property
    def seconds(self) -> float:
        return 15.0 if self.quick else 60.0

    @property
    def warm_s(self) -> float:
        return 6.0 if self.quick else 10.0


@dataclass(frozen=True, slots=True)
class Bench:
    case: FairnessCase
    deployment: FairDeployment
    tell: Callable[[str], None]

    async def measured(self, load: Load) -> tuple[float, float]:
        """Let `load` warm up and run; the span that counts."""
        await asyncio.sleep(self.case.warm_s)
        begin = time.monotonic()
        await asyncio.sleep(self.case.seconds)
        await self.deployment.check()
        return begin, time.monotonic()


def run(case: FairnessCase, *, console: Console, tell: Callable[[str], None]) -> Report:
    """Start the deployment, measure, stop it. Raises LocalError when a process cannot be started or ended meanwhile.

    `results`: `ratio` (service of weight 3 over weight 1) and `ratio_fcfs`, `gap` and `gap_fcfs` (charged tokens
    divided by weight) with `bound`, `polite_share` and `polite_share_fcfs` (of its demand), `polite_ttft_ms_p50`
    likewise, `tokens_per_s` and `tokens_per_s_fcfs` with `price`, and `short_ttft_ms_p99` `_alone`, `_lane` and
    `_no_lane` with `short_ttft_ratio` and `short_ttft_ratio_no_lane`.
    """
    shape = {
        "quick": case.quick,
        "seconds": case.seconds,
        "gateways": GATEWAYS,
        "replicas": REPLICAS,
        "speed": SPEED._asdict(),
        "weights": WEIGHTS,
        "flood": {"prompt": PROMPT, "output": OUTPUT, "at_once": AT_ONCE * GATEWAYS},
        "long": {"prompt": LONG_PROMPT, "at_once": LONG_AT_ONCE * GATEWAYS},
    }
    report = Report("fairness", shape, case.seed)
    with FairDeployment(console, SPEED) as deployment:
        bench = Bench(case, deployment, tell)
        keys = {
            "light": deployment.tenant("light", WEIGHTS[0]),
            "heavy": deployment.tenant("heavy", WEIGHTS[1]),
            "polite": deployment.tenant("polite", 1.0, POLITE_FLOOR),
        }
        report.take(asyncio.run(_shares(bench, keys)))
        report.take(asyncio.run(_lanes(bench, keys)))
    return report


async def _shares(bench: Bench, keys: dict[str, str]) -> Section:
    """Two floods and a polite third, in turns and by arrival."""
    bench.tell("two tenants flood, in turns")
    fair = await _flooded(bench, keys, SPEED.slots)
    bench.tell("two tenants flood, by arrival")
    fcfs = await _flooded(bench, keys, UNBOUNDED)
    await asyncio.to_thread(bench.deployment.hold, SPEED.slots)
    held = SPEED.slots * REPLICAS * OUTPUT
    unsent = CHARGES.output * fair["output_per_s"] * FLUSH_S
    bound = vtc_bound(PROMPT, held, unsent, min(WEIGHTS))
    price = 1 - fair["tokens_per_s"] / fcfs["tokens_per_s"]
    results = {name: fair[name] for name in ("ratio", "gap", "polite_share", "polite_ttft_ms_p50", "tokens_per_s")}
    results |= {f"{name}_fcfs": fcfs[name] for name in list(results)}
    results |= {"bound": bound, "price": price, "refused": fair["refused"], "refused_fcfs": fcfs["refused"]}
    rows = (
        ("service, weight 3 over weight 1", f"{fair['ratio']:.2f}", f"{fcfs['ratio']:.2f}", "2.70 to 3.30"),
        ("largest gap, charged tokens / weight", f"{fair['gap']:,.0f}", f"{fcfs['gap']:,.0f}", f"≤ {bound:,.0f}"),
        ("polite third: share of its demand", f"{fair['polite_share']:.1%}", f"{fcfs['polite_share']:.1%}", "≥ 95 %"),
        ("polite third: TTFT p50, ms", f"{fair['polite_ttft_ms_p50']:.0f}", f"{fcfs['polite_ttft_ms_p50']:.0f}", ""),
        ("all tenants, tokens/s", f"{fair['tokens_per_s']:,.0f}", f"{fcfs['tokens_per_s']:,.0f}", ""),
        ("price of fairness, of throughput", f"{price:.1%}", "", ""),
    )
    title = f"Two tenants flood {GATEWAYS} gateways, weights 1 and 3"
    note = "By arrival is the control: the engine holds all that comes. The bound is 2·(U + S / w) of VTC."
    return Section([Table(title, ("", "in turns", "by arrival", "wanted"), rows, note)], results)


async def _flooded(bench: Bench, keys: dict[str, str], slots: int) -> dict[str, Any]:
    deployment = bench.deployment
    await asyncio.to_thread(deployment.hold, slots)
    async with Load(deployment.gateways, deployment.model) as load:
        for tenant in ("light", "heavy"):
            load.flood(Ask(tenant, keys[tenant], PROMPT, OUTPUT), AT_ONCE)
        load.pace(Ask("polite", keys["polite"], POLITE_PROMPT, POLITE_OUTPUT), POLITE_EVERY_S)
        begin, end = await bench.measured(load)
        light, heavy, polite = (load.heard[name] for name in ("light", "heavy", "polite"))
        seconds = end - begin
        output = sum(each.counted(begin, end) for each in (light, heavy)) * OUTPUT / (PROMPT + OUTPUT)
        return {
            "ratio": heavy.charged(begin, end) / max(1.0, light.charged(begin, end)),
            "gap": largest_gap(light, heavy, WEIGHTS, begin, end),
            "polite_share": polite.counted(begin, end) / seconds / POLITE_FLOOR,
            "polite_ttft_ms_p50": _p(polite, begin, end, 0.5),
            "tokens_per_s": sum(each.counted(begin, end) for each in (light, heavy, polite)) / seconds,
            "output_per_s": output / seconds,
            "refused": light.refused + heavy.refused + polite.refused,
        }


async def _lanes(bench: Bench, keys: dict[str, str]) -> Section:
    """Short prompts alone, beside a flood of the longest, and so without a lane."""
    deployment = bench.deployment
    bench.tell("short prompts alone")
    alone = await _short(bench, keys, deployment.gateways, flood=False)
    bench.tell("short prompts beside a flood of the longest")
    lane = await _short(bench, keys, deployment.gateways, flood=True)
    bench.tell("the same without a lane")
    await asyncio.to_thread(deployment.hold, UNBOUNDED)
    none = await _short(bench, keys, [deployment.control] * GATEWAYS, flood=True)
    rows = (
        ("alone", f"{alone:.0f}", "1.00", ""),
        ("beside a flood, with a lane", f"{lane:.0f}", f"{lane / alone:.2f}", "≤ 1.50"),
        ("beside a flood, without", f"{none:.0f}", f"{none / alone:.2f}", "the control"),
    )
    results = {
        "short_ttft_ms_p99_alone": alone,
        "short_ttft_ms_p99_lane": lane,
        "short_ttft_ms_p99_no_lane": none,
        "short_ttft_ratio": lane / alone,
        "short_ttft_ratio_no_lane": none / alone,
    }
    title = f"TTFT of short prompts beside a flood of {LONG_PROMPT:,}-token prompts"
    return Section([Table(title, ("", "p99, ms", "of alone", "wanted"), rows)], results)


async def _short(bench: Bench, keys: dict[str, str], gateways: list[str], *, flood: bool) -> float:
    async with Load(gateways, bench.deployment.model) as load:
        if flood:
            load.flood(Ask("light", keys["light"], LONG_PROMPT, LONG_OUTPUT), LONG_AT_ONCE)
        load.pace(Ask("polite", keys["polite"], SHORT_PROMPT, SHORT_OUTPUT), SHORT_EVERY_S)
        begin, end = await bench.measured(load)
        return _p(load.heard["polite"], begin, end, 0.99)


def _p(heard: Heard, begin: float, end: float, share: float) -> float:
    """A quantile of TTFT in ms. Raises ValueError when nothing was answered."""
    return quantile(heard.first_tokens(begin, end), share) * 1000
