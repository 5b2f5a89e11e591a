"""`tidegate bench engine`: the parts put together, and nothing left behind.

Layer: service. It installs peers, starts both sides, has them take turns and says what was found. A peer that cannot
be had, or that fails while it is measured, is said in one sentence, and the others go on.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dataplane.bench.engine.case import EngineCase, checkpoint_hash
from dataplane.bench.engine.client import Caller
from dataplane.bench.engine.findings import alone, compared, table_alone, table_of
from dataplane.bench.engine.paired import METHOD
from dataplane.bench.engine.peers import llama_cpp, ours, transformers, vllm
from dataplane.bench.engine.peers.setting import Prepare, Setting
from dataplane.bench.engine.prompts import Prompts
from dataplane.bench.engine.server import Launch, Server
from dataplane.bench.engine.turns import Measured, Side, Turns
from dataplane.bench.engine.workloads import LONGEST, MAKERS, SEATS, Arrivals, Batch, Workload, batch_of_equal
from dataplane.bench.environment import Environments
from dataplane.bench.errors import BenchError, NotToBeHadError, SideError
from dataplane.bench.report import Report, Table
from dataplane.config import find_model
from dataplane.hardware.probe import cpu_name
from dataplane.tokenizer import load_tokenizer

SELF = "self"
PEERS: Mapping[str, Prepare] = {
    transformers.NAME: transformers.prepare,
    llama_cpp.NAME: llama_cpp.prepare,
    vllm.NAME: vllm.prepare,
}
CORES = 2
Ours = Callable[[Setting, Sequence[str], str], Launch]
"""How our engine is started with flags, under a name."""
US = "tidegate"


@dataclass(frozen=True, slots=True)
class Asked:
    """What a run is to do. `flags` go to our engine's command line; `environments` keeps what is installed there."""

    model: str = "smollm2"
    only: Collection[str] = ()
    against: Sequence[str] = ()
    pairs: int = 10
    quick: bool = False
    seed: int = 0
    flags: tuple[str, ...] = ()
    peer_format: str = ""
    environments: Path | None = None
    ours: Ours = ours.prepare
    peers: Mapping[str, Prepare] = field(default_factory=lambda: PEERS)


@dataclass(slots=True)
class Outcome:
    """The report, and which peers are missing, or failed under some load, with why."""

    report: Report
    missing: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class EngineBench:
    """One run. `results`: `case_sha256`, `method`; without peers `ours` by load, else `against.<peer>` by load (see
    `findings.compared`) with `setup` and `version` of both sides. A load that a side fails under has `failed`, a peer
    that cannot be had `missing`, with why.
    """

    def __init__(self, asked: Asked, console: Console) -> None:
        self._asked = asked
        self._console = console
        self._path, self._name = find_model(asked.model)
        available = sorted(os.sched_getaffinity(0))
        self._cores = available[:CORES]
        self._workloads = [make(asked.quick) for name, make in MAKERS.items() if not asked.only or name in asked.only]
        self._launches: dict[str, Launch] = {}

    def run(self) -> Outcome:
        """Raises BenchError for what ends all of it: our own engine does not serve, or fails."""
        outcome = Outcome(Report("engine", {}, self._asked.seed))
        with self._on_its_cores(), tempfile.TemporaryDirectory(prefix="tidegate-bench-") as scratch:
            kept = self._asked.environments
            environments = Environments((kept or Path(scratch) / "environments").absolute(), self._tell)
            environments.folder.mkdir(parents=True, exist_ok=True)
            setting = Setting(
                model=self._path,
                longest=LONGEST,
                seats=SEATS,
                threads=len(self._cores),
                folder=Path(scratch),
                environments=environments,
                format=self._asked.peer_format,
            )
            if self._asked.against:
                self._all_peers(setting, outcome)
            else:
                self._alone(setting, outcome)
        self._conclude(outcome)
        return outcome

    # Sides -------------------------------------------------------------------------------------------------------

    def _all_peers(self, setting: Setting, outcome: Outcome) -> None:
        results: dict[str, Any] = {}
        for name in self._asked.against:
            try:
                found = self._beside(name, setting)
            except NotToBeHadError as error:
                outcome.missing[name] = str(error)
                results[name] = {"missing": str(error)}
            else:
                results[name] = {**found, **self._described(name)}
                failed = {load: result["failed"] for load, result in found.items() if "failed" in result}
                if failed:
                    outcome.failed[name] = "; ".join(f"{load}: {why}" for load, why in failed.items())
                measured = {load: result for load, result in found.items() if load not in failed}
                if measured:
                    outcome.report.tables.append(table_of(name, measured, self._note(name)))
        outcome.report.results["against"] = results
        for why, peers in (("cannot be had", outcome.missing), ("failed", outcome.failed)):
            rows = tuple((name, sentence) for name, sentence in peers.items())
            if rows:
                outcome.report.tables.append(Table(f"Not measured: {why}", ("peer", "why"), rows))

    def _beside(self, name: str, setting: Setting) -> dict[str, dict[str, Any]]:
        theirs = self._ours(setting, SELF) if name == SELF else self._asked.peers[name](setting)
        mine = self._ours(setting, US)
        measured = self._measure([mine, theirs], setting, name)
        self._launches |= {US: mine, name: theirs}
        return measured

    def _alone(self, setting: Setting, outcome: Outcome) -> None:
        mine = self._launches[US] = self._ours(setting, US)
        found = self._measure([mine], setting, "")
        outcome.report.results["ours"] = {**found, "setup": dict(mine.setup), "version": mine.version}
        outcome.report.tables.append(table_alone(found, f"tidegate {mine.version}: {_said(mine)}."))

    def _ours(self, setting: Setting, name: str) -> Launch:
        return self._asked.ours(setting, self._asked.flags, name)

    def _measure(self, launches: Sequence[Launch], setting: Setting, peer: str) -> dict[str, dict[str, Any]]:
        prompts = Prompts(load_tokenizer(self._path), self._asked.seed)
        with ExitStack() as stack:
            servers = []
            for launch in launches:
                self._tell(f"starting {launch.endpoint.name}")
                log = setting.folder / f"{launch.endpoint.name}.log"
                servers.append(stack.enter_context(Server(launch, cores=self._cores, log=log)))
            return asyncio.run(self._loads(servers, prompts, peer))

    async def _loads(self, servers: Sequence[Server], prompts: Prompts, peer: str) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        equal = batch_of_equal(quick=self._asked.quick)
        capacity = 0.0
        async with AsyncExitStack() as stack:
            callers = [await stack.enter_async_context(Caller(server.launch.endpoint)) for server in servers]
            turns = Turns([Side(server, caller) for server, caller in zip(servers, callers, strict=True)], prompts)
            conclude = compared if len(servers) > 1 else alone
            progress = stack.enter_context(self._progress())
            for asked in self._workloads:
                workload, pairs = asked, self._asked.pairs
                try:
                    if isinstance(workload, Arrivals):
                        capacity = capacity or _capacity(equal, await turns.take(equal, 1, lambda: None))
                        workload = workload.at(capacity / 2)
                    measured = await turns.take(workload, pairs, self._bar(progress, workload, peer))
                except SideError as error:
                    if not peer:
                        raise
                    # What was measured before stands, and what comes next may go better.
                    found[workload.name] = {"failed": str(error)}
                    continue
                found[workload.name] = conclude(workload, measured)
                if isinstance(workload, Arrivals):
                    found[workload.name]["half_rate_per_s"] = workload.half_rate
                elif workload.name == equal.name:
                    capacity = _capacity(equal, measured)
        return found

    # Words -------------------------------------------------------------------------------------------------------

    def _conclude(self, outcome: Outcome) -> None:
        case = self._case()
        outcome.report.case = case.document()
        outcome.report.results |= {"case_sha256": case.sha256, "method": METHOD}

    def _case(self) -> EngineCase:
        sides = sorted(self._launches.items())
        return EngineCase(
            model=self._name,
            checkpoint=checkpoint_hash(self._path),
            hardware={"cpu": cpu_name(), "cores": len(self._cores)},
            threads=len(self._cores),
            dtype={name: launch.setup["dtype"] for name, launch in sides},
            lengths={workload.name: workload.lengths for workload in self._workloads},
            arrival={
                workload.name: "Poisson at 1/s and at half the slower side's w3_equal"
                if isinstance(workload, Arrivals)
                else "all at once"
                for workload in self._workloads
            },
            flags={name: {**launch.setup, "version": launch.version} for name, launch in sides},
            pairs=self._asked.pairs,
            quick=self._asked.quick,
            seed=self._asked.seed,
        )

    def _described(self, name: str) -> dict[str, Any]:
        mine, theirs = self._launches[US], self._launches[name]
        return {
            "setup": {"ours": dict(mine.setup), "peer": dict(theirs.setup)},
            "version": {"ours": mine.version, "peer": theirs.version},
        }

    def _note(self, name: str) -> str:
        lengths = "; ".join(f"{workload.name} {_lengths(workload.lengths)}" for workload in self._workloads)
        sides = "\n".join(
            f"{side} {launch.version}: {_said(launch)}."
            for side, launch in ((US, self._launches[US]), (name, self._launches[name]))
        )
        return f"{sides}\nTokens: {lengths}.\nRatios are medians of pairs, above 1 ours is better; intervals: {METHOD}."

    def _tell(self, what: str) -> None:
        self._console.print(f"{what} …", style="dim")

    def _progress(self) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        return Progress(*columns, console=self._console, transient=not self._console.is_terminal)

    def _bar(self, progress: Progress, workload: Workload, peer: str) -> Callable[[], None]:
        what = f"{workload.name} {f'beside {peer}' if peer else 'alone'}"
        if not self._console.is_terminal:
            self._tell(what)
        task = progress.add_task(what, total=self._asked.pairs)
        return lambda: progress.advance(task)

    @contextmanager
    def _on_its_cores(self) -> Iterator[None]:
        """The load runs on the servers' cores: both sides pay for it alike. SIGTERM is Ctrl-C meanwhile."""
        before, handler = os.sched_getaffinity(0), signal.getsignal(signal.SIGTERM)
        os.sched_setaffinity(0, self._cores)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # also where Ctrl-C is ignored
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, handler)
            os.sched_setaffinity(0, before)


def run(asked: Asked, console: Console) -> Outcome:
    """Raises BenchError, ConfigError."""
    unknown = [name for name in asked.against if name != SELF and name not in asked.peers]
    if unknown:
        raise BenchError(f"there is no peer {unknown[0]}; known are {', '.join([*asked.peers, SELF])}")
    return EngineBench(asked, console).run()


def _capacity(batch: Batch, measured: Measured) -> float:
    """Requests a second that the slower side gets through."""
    return batch.requests / max(median(turn["total_s"] for turn in turns) for turns in measured.figures)


def _said(launch: Launch) -> str:
    return "; ".join(f"{name} {value}" for name, value in launch.setup.items())


def _lengths(lengths: Mapping[str, Any]) -> str:
    parts = []
    for name, value in lengths.items():
        inner = f"({_lengths(value)})" if isinstance(value, Mapping) else value
        parts.append(f"{name} {'–'.join(map(str, inner)) if isinstance(inner, list) else inner}")
    return ", ".join(parts)
