"""The scheduler's bench: directions and controls, never a time. Made-up inputs, and public traces where they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dataplane.bench.cli import bench
from dataplane.bench.scheduler import EXPERIMENTS, run
from dataplane.bench.scheduling import batching, cache, capacity, chunking, fairness, overhead
from dataplane.bench.scheduling.case import SchedulerCase
from dataplane.bench.traces import PLACES, Trace, TraceKind, TraceMissingError, TraceRow, Traces
from dataplane.bench.workload import Lengths, exponential, lengths_of, request_of, requests_of_trace
from dataplane.protocol import RequestOutput
from dataplane.scheduling.config import Batching, Capacity, Preemption, QueueOrder
from dataplane.scheduling.plan import NewRequest, Plan
from tests.factories.processes import in_a_fresh_process

CASE = SchedulerCase(quick=True)
CHAT: list[Lengths] = [
    (prompt, output) for prompt, (_, output) in zip([40, 200, 90, 500] * 30, exponential(120, 150, 1, 1), strict=True)
]


# ------------------------------------------------------------------------------------------------------------ batching


@pytest.mark.parametrize("batch", [4, 8])
def test_without_variance_no_batching_mode_gains_anything(batch: int) -> None:
    lengths = [(16, 40)] * (6 * batch)
    found = {mode: batching.run_mode(mode, batch, lengths, CASE).throughput for mode in Batching}
    for mode, throughput in found.items():
        assert throughput == pytest.approx(found[Batching.STATIC], rel=0.01), mode


def test_with_outputs_of_exponential_length_continuous_batching_gains() -> None:
    lengths = exponential(160, 60, 0, 16)
    found = {mode: batching.run_mode(mode, 8, lengths, CASE) for mode in Batching}
    gain = found[Batching.CONTINUOUS].throughput / found[Batching.STATIC].throughput
    assert gain > 1.7
    assert found[Batching.SELECTIVE].throughput > 1.7 * found[Batching.STATIC].throughput
    assert found[Batching.DYNAMIC].throughput == pytest.approx(found[Batching.STATIC].throughput, rel=0.05)
    assert {outcome.output_tokens for outcome in found.values()} == {sum(output for _, output in lengths)}


def test_where_no_queue_is_a_batch_that_waits_loses() -> None:
    lengths = exponential(60, 60, 0, 16)
    found = {mode: batching.run_mode(mode, 8, lengths, CASE, 1.0) for mode in Batching}
    ttft = {mode: sum(outcome.ttft) for mode, outcome in found.items()}
    assert ttft[Batching.STATIC] > 3 * ttft[Batching.CONTINUOUS]
    assert ttft[Batching.DYNAMIC] > 3 * ttft[Batching.CONTINUOUS]


@pytest.mark.slow
def test_at_32_sequences_continuous_batching_gains_more_than_two_and_a_half_times() -> None:
    lengths = exponential(32 * 24, batching.OUTPUT, 0, 16)
    static, continuous = (
        batching.run_mode(mode, 32, lengths, CASE).throughput for mode in (Batching.STATIC, Batching.CONTINUOUS)
    )
    assert continuous > 2.5 * static


# ------------------------------------------------------------------------------------------------------------ capacity


def test_the_less_is_reserved_the_more_is_useful_and_the_more_run() -> None:
    found = {policy.name: capacity.run_policy(policy, CHAT, CASE) for policy in capacity.POLICIES}
    useful = [found[name].useful for name in ("max", "pow2", "oracle", "paged-16")]
    assert useful == sorted(useful)
    assert useful[0] < 0.3
    assert useful[-1] > 0.95
    assert useful[2] < found["paged-128"].useful < useful[-1], "larger blocks are emptier"
    batches = [found[name].mean_batch for name in ("max", "pow2", "oracle", "paged-16")]
    assert batches == sorted(batches)
    assert found["paged-16"].throughput > 1.5 * found["max"].throughput
    assert [found[name].preemptions for name in ("max", "pow2", "oracle")] == [0, 0, 0], (
        "who reserves is never preempted"
    )


def test_a_watermark_saves_preemptions_and_the_work_done_again() -> None:
    none, some = (capacity.run_policy(capacity.Policy("paged-16"), CHAT * 2, CASE, mark) for mark in (0.0, 0.1))
    assert 0 <= some.preemptions < none.preemptions / 2
    assert 1.0 <= some.recomputed < none.recomputed


def test_where_outputs_are_known_and_short_paging_gains_little() -> None:
    """The losing regime: nothing is reserved in vain."""
    lengths = [(1900, 4)] * 40
    found = {policy.name: capacity.run_policy(policy, lengths, CASE) for policy in capacity.POLICIES}
    assert found["paged-16"].throughput < 1.1 * found["max"].throughput


# ------------------------------------------------------------------------------------------------------------ chunking


def assert_frontier(found: dict[str, chunking.Latency], *, throughput: float) -> None:
    """From prefill-first down to the smallest chunk: gaps shrink, first tokens come later, and no work is saved."""
    latencies = list(found.values())
    first = latencies[0]
    gaps, firsts = [each.itl_p99 for each in latencies], [each.ttft_p99 for each in latencies[1:]]
    assert gaps[1:] == sorted(gaps[1:], reverse=True)
    assert firsts == sorted(firsts)
    assert firsts[-1] > first.ttft_p99, "the price"
    assert found["512"].itl_p99 < first.itl_p99, "the gain"
    for each in latencies:
        assert each.prefill_tokens == first.prefill_tokens
        assert each.prefill_s >= 0.97 * first.prefill_s
        assert each.throughput == pytest.approx(first.throughput, rel=throughput)
        assert each.preemptions == 0
    assert latencies[-1].prefill_s > first.prefill_s


def test_chunks_shorten_the_gaps_and_delay_the_first_token() -> None:
    lengths = [
        (prompt, output)
        for prompt, (_, output) in zip([3000, 400, 1500, 700] * 40, exponential(160, 40, 2, 1), strict=True)
    ]
    _, found = chunking.frontier(lengths, CASE, 0.8)
    assert list(found) == ["prefill-first", "2048", "1024", "512", "256"]
    assert_frontier(found, throughput=0.02)  # so few requests that the last of them weigh


def test_the_gain_of_chunks_and_their_price_grow_with_the_load() -> None:
    lengths = [(900, 40)] * 60
    capacity = chunking.run_chunk(None, lengths, CASE, None).throughput / 40
    loads = chunking.by_load(lengths, CASE, capacity)
    gains = [both["prefill-first"].itl_p99 / both["512"].itl_p99 for both in loads.values()]
    assert list(loads) == [0.8, 0.9, 1.0, 1.1]
    assert gains[-1] > gains[0] > 1
    assert loads[1.1]["512"].ttft_p99 > loads[0.8]["512"].ttft_p99


def test_where_prompts_are_shorter_than_a_chunk_there_is_nothing_to_cut() -> None:
    """The control: three tenths of the load, prompts of one block."""
    lengths = [(16, 40)] * 60
    _, found = chunking.frontier(lengths, CASE, 0.3)
    assert found["512"].itl_p99 == pytest.approx(found["2048"].itl_p99)
    assert found["512"].ttft_p99 == pytest.approx(found["2048"].ttft_p99)


def test_prefill_first_lets_no_decode_into_a_step_with_prompts() -> None:
    outcome = chunking.run_chunk(None, [(1000, 20)] * 10, CASE, 2.0)
    a, b, c = CASE.cost.prefill
    assert max(outcome.itl) > (a + b * 1000 + c * 1000**2) / 1000, "a decode waited for a whole prompt"


# ------------------------------------------------------------------------------------------------------------ fairness


@pytest.fixture(scope="module")
def two_clients() -> dict[QueueOrder, fairness.Fairness]:
    return {
        order: fairness.run_order(order, fairness.steady(fairness.PER_MINUTE, 1.0), CASE) for order in fairness.ORDERS
    }


def test_virtual_token_counters_keep_the_bound_and_first_come_first_served_does_not(
    two_clients: dict[QueueOrder, fairness.Fairness],
) -> None:
    vtc, fcfs = two_clients[QueueOrder.VTC], two_clients[QueueOrder.FCFS]
    assert vtc.bound == fcfs.bound == 40_000
    assert vtc.gap < vtc.bound < fcfs.gap
    assert vtc.waited_s > 30
    assert vtc.tokens_per_s == pytest.approx(fcfs.tokens_per_s, rel=0.01), "both keep the machine busy"
    assert vtc.ttft_p50["a"] < fcfs.ttft_p50["a"] / 2, "the client that asks for less waits less"
    assert vtc.ttft_p50["b"] > fcfs.ttft_p50["b"], "and the other pays"


def test_the_bound_is_promised_where_memory_is_reserved_and_broken_where_requests_are_preempted() -> None:
    crowd = {name: rate / 2 for name, rate in fairness.PER_MINUTE.items()}
    demand, reserved = (
        fairness.run_order(
            QueueOrder.VTC,
            fairness.steady(crowd, 1.0, **fairness.CROWDED),
            CASE,
            slots=fairness.CROWDED_SLOTS,
            capacity=how,
        )
        for how in (Capacity.ON_DEMAND, Capacity.RESERVE_MAX)
    )
    assert demand.bound == reserved.bound == 2 * 2 * 2000
    assert (demand.promised, reserved.promised) == (False, True)
    assert (demand.preemptions > 100, reserved.preemptions) == (True, 0)
    assert demand.gap > 1.5 * demand.bound
    assert reserved.gap < reserved.bound


def test_with_one_client_or_no_queue_the_order_changes_nothing() -> None:
    for rates in ({"a": 240.0}, {"a": 30.0, "b": 60.0}):
        vtc, fcfs = (
            fairness.run_order(order, fairness.steady(rates, 0.5), CASE) for order in (QueueOrder.VTC, QueueOrder.FCFS)
        )
        assert vtc == fcfs
        assert vtc.gap == 0.0


def test_the_gap_is_what_two_waiting_clients_differ_in() -> None:
    """By hand: while both wait, `a` is served a prompt of 100 and `b` nothing."""
    watch = fairness.ServiceWatch({"a", "b"})
    rows = [TraceRow(0.0, 100, 5, name) for name in ("a", "a", "b")]
    arriving = watch.arriving(requests_of_trace(rows))
    for _ in arriving:
        pass
    plan = _admits("0", 100)
    watch(None, plan, [], 1.0)  # type: ignore[arg-type]  # it looks at plan and outputs alone
    assert watch.gap == 0.0, "a gap is a change, and this is where they begin"
    watch(None, _admits("0", 100), [], 2.0)  # type: ignore[arg-type]  # again after a preemption: nobody is served
    assert watch.gap == 0.0
    watch(None, _admits(), [_output("0", 3)], 3.0)  # type: ignore[arg-type]
    assert watch.gap == 6.0
    watch(None, _admits("2", 100), [], 4.0)  # type: ignore[arg-type]  # `b` waits no more
    watch(None, _admits(), [_output("0", 50)], 5.0)  # type: ignore[arg-type]
    assert watch.gap == 6.0
    assert list(watch.service) == [206.0, 100.0]
    assert watch.waited_s == 3.0


def _admits(request_id: str = "", prompt: int = 0) -> Plan:
    params = request_of("x", [0], 1).params
    new = (NewRequest(request_id, [0] * prompt, prompt, params, 0, (), [], 0),) if request_id else ()
    return Plan(1, {}, frozenset(), new=new)


def _output(request_id: str, count: int) -> RequestOutput:
    return RequestOutput(request_id=request_id, token_ids=[0] * count)


# --------------------------------------------------------------------------------------------------------------- cache


def shared_prompts(groups: int = 40, each: int = 4) -> Trace:
    """Requests in turn from `groups` groups, each with a prefix of its own of six blocks, all within four seconds."""
    rows = []
    for number in range(groups * each):
        group = number % groups
        prefix = tuple(group * 100 + block for block in range(6))
        rows.append(TraceRow(number / 24, 7 * 512, 8, blocks=(*prefix, 1_000_000 + number)))
    return Trace("shared", TraceKind.MOONCAKE, tuple(rows))


def test_an_order_by_hits_finds_more_in_a_small_cache_and_nothing_more_in_a_large_one() -> None:
    trace = shared_prompts()
    small, large = cache.Regime("small", 150, 1.0), cache.Regime("large", 10_000, 1.0)
    fcfs, aware = (cache.run_cached(order, trace, small, CASE) for order in cache.ORDERS)
    assert aware.hits > 1.2 * fcfs.hits
    assert aware.prefill_tokens < fcfs.prefill_tokens
    assert aware.ttft_mean < fcfs.ttft_mean
    fcfs, aware = (cache.run_cached(order, trace, large, CASE) for order in cache.ORDERS)
    assert aware.hits == pytest.approx(fcfs.hits, abs=0.02)
    # Whoever finds its six blocks of seven saves 36/49 of its attention, and 6/7 of the rest.
    assert fcfs.attention == pytest.approx(fcfs.hits * 6 / 7)


def test_without_a_queue_an_order_changes_nothing() -> None:
    trace = shared_prompts(4, 3)
    fcfs, aware = (cache.run_cached(order, trace, cache.Regime("light", 120, 0.0), CASE) for order in cache.ORDERS)
    assert fcfs == aware


# ------------------------------------------------------------------------------------------------------------ overhead


@pytest.mark.parametrize("how", [Preemption.RECOMPUTE, Preemption.SWAP])
def test_a_soak_ends_with_every_block_free(how: Preemption) -> None:
    found = overhead.soak(CASE, 600, how)
    assert found.requests == 600
    assert found.preemptions > 20
    assert found.free_blocks == found.usable_blocks == overhead.TINY_BLOCKS - 1


@pytest.mark.slow
def test_ten_thousand_requests_leave_every_block_free_and_no_memory_behind() -> None:
    found = in_a_fresh_process(overhead.soak, CASE, 10_000, Preemption.RECOMPUTE)
    assert found.requests == 10_000
    assert found.free_blocks == found.usable_blocks
    # Nine thousand requests: less than 100 bytes each, where one that is kept has thousands.
    assert found.rss_end - found.rss_tenth < found.kept + 900_000


def test_a_step_does_not_grow_with_those_that_ended() -> None:
    """A ratio of medians in one process: wide enough for a busy machine; a loop over all that ended costs far more."""
    old = overhead.Decoding(CASE, running=32)
    for _ in range(30):
        old.fill(2)
        old.drain()
    fresh, history = overhead.measure((overhead.Decoding(CASE, running=32), old))
    assert (fresh.history, history.history) == (0, 960)
    assert history.total_ms < 3 * fresh.total_ms


# ------------------------------------------------------------------------------------------------- the bench as a whole


def test_a_part_without_its_trace_is_skipped_with_a_reason() -> None:
    for name in ("capacity", "chunking", "cache"):
        with pytest.raises(TraceMissingError):
            EXPERIMENTS[name](CASE, Traces(None))
    report = run(None, only=["cache"], quick=True)
    assert report.results["cache"] == {"skipped": "no traces were given (--trace)"}


def test_the_command_prints_tables_and_writes_what_they_say(tmp_path: Path) -> None:
    trace = tmp_path / "mine.csv"
    rows = "".join(f"{number * 0.05},c{number % 3},{20 + number % 50},{5 + number % 40}\n" for number in range(120))
    trace.write_text("req_time_s,client,prompt_len,output_len\n" + rows)
    out = tmp_path / "out.json"
    arguments = [
        "scheduler",
        "--trace",
        str(trace),
        "--quick",
        "--only",
        "capacity",
        "--only",
        "cache",
        "--json",
        str(out),
    ]
    result = CliRunner().invoke(bench, arguments)
    assert result.exit_code == 0, result.output
    assert "useful share" in result.output
    found = json.loads(out.read_text())
    assert found["bench"] == "scheduler"
    assert found["results"]["capacity"]["policies"]["vtc"]["paged-16"]["useful"] > 0
    assert "is not the trace it needs" in found["results"]["cache"]["skipped"]


def test_a_trace_that_cannot_be_read_ends_the_command_with_a_sentence(tmp_path: Path) -> None:
    trace = tmp_path / "odd.csv"
    trace.write_text("a,b\n")
    result = CliRunner().invoke(bench, ["scheduler", "--trace", str(trace)])
    assert result.exit_code == 2
    assert "line 1" in result.output
    assert "Traceback" not in result.output


def test_the_command_offers_the_parts_there_are() -> None:
    (only,) = (option for option in bench.commands["scheduler"].params if option.name == "only")
    assert list(only.type.choices) == list(EXPERIMENTS)  # type: ignore[attr-defined]


# --------------------------------------------------------------------------------------------------- the public traces


def test_useful_shares_on_public_lengths(public_traces: Traces) -> None:
    lengths = lengths_of(public_traces.read("vtc", 250).rows, 2048)
    found = {policy.name: capacity.run_policy(policy, lengths, CASE) for policy in capacity.POLICIES}
    assert [round(found[name].useful, 1) for name in ("max", "pow2", "oracle")] == [0.2, 0.5, 0.6]
    assert found["paged-16"].useful > 0.95
    assert found["paged-16"].throughput > 2 * found["max"].throughput


@pytest.mark.slow
@pytest.mark.parametrize("role", ["conv", "arxiv"])
def test_the_frontier_is_monotone_on_public_lengths(public_traces: Traces, role: str) -> None:
    lengths = lengths_of(public_traces.read(role, 800).rows, chunking.LONGEST)[:400]
    _, found = chunking.frontier(lengths, CASE, chunking.LOAD)
    assert_frontier(found, throughput=0.01)  # a second or two of some two hundred, by which the last of them end later
    assert found["512"].itl_p99 < found["prefill-first"].itl_p99 / 1.5


@pytest.mark.slow
def test_the_bound_holds_for_the_public_clients(public_traces: Traces) -> None:
    rows = public_traces.read("vtc", 800).rows
    found = {
        order: fairness.run_order(order, list(requests_of_trace(rows, fairness.SPEED)), CASE)
        for order in fairness.ORDERS
    }
    vtc, fcfs = found[QueueOrder.VTC], found[QueueOrder.FCFS]
    assert vtc.gap < vtc.bound < fcfs.gap
    assert vtc.tokens_per_s > 0.9 * fcfs.tokens_per_s


@pytest.mark.slow
def test_cache_aware_order_finds_more_on_the_public_conversations(public_traces: Traces) -> None:
    trace = public_traces.read("mooncake", 300)
    crowded, fits, _ = cache.regimes(cache.PLAYED["mooncake"])
    fcfs, aware = (cache.run_cached(order, trace, crowded, CASE) for order in cache.ORDERS)
    assert aware.hits > 1.3 * fcfs.hits
    assert aware.ttft_mean < fcfs.ttft_mean
    fcfs, aware = (cache.run_cached(order, trace, fits, CASE) for order in cache.ORDERS)
    assert aware.hits == pytest.approx(fcfs.hits, abs=0.01)


def test_every_trace_the_parts_ask_for_has_a_place(public_traces: Traces) -> None:
    for role in PLACES:
        assert public_traces.read(role, 1).rows
