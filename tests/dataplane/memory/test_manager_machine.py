"""Random use of a `KVManager` alone, with a memory that moves what it says: everyone always reads his own prefix.

Every slot holds a digest of the whole sequence up to it. A step clears, moves, and writes what was planned; then each
request's slots must hold its own digests, whatever was shared, copied, evicted, swapped and brought back in between.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dataplane.memory.manager import KVManager
from dataplane.protocol import BlockRemoved, BlockStored
from dataplane.request import Request
from dataplane.scheduling.plan import Transfers
from tests.factories.kv_memory import KVMemory
from tests.factories.requests import fold, make_request

TENANTS = ("acme", "beta")
TOKENS = st.integers(0, 2)


class ManagerMachine(RuleBasedStateMachine):
    """`running` hold blocks, `swapped` are in host memory, `waiting` hold nothing and start over."""

    @initialize(
        num_blocks=st.integers(2, 14),
        block_size=st.sampled_from([1, 2, 4, 4]),
        host_blocks=st.sampled_from([0, 1, 2, 4, 8]),
        caching=st.sampled_from([True, True, False]),
    )
    def build(self, num_blocks: int, block_size: int, host_blocks: int, *, caching: bool) -> None:
        self.manager = KVManager(num_blocks, block_size, prefix_caching=caching, events=True, host_blocks=host_blocks)
        self.size, self.slots = block_size, (num_blocks - 1) * block_size
        self.memory = KVMemory(block_size)
        self.running: dict[str, Request] = {}
        self.swapped: dict[str, Request] = {}
        self.waiting: dict[str, Request] = {}
        self.tables: dict[str, list[int]] = {}
        self.planned: dict[str, tuple[int, int]] = {}
        self.indexed: set[bytes] = set()
        self.ids = 0

    # ---------------------------------------------------------------------------------------------------- in a step

    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        length = data.draw(st.integers(1, self.slots + 1))
        shared = data.draw(st.booleans())
        prompt = [1] * length if shared else data.draw(st.lists(TOKENS, min_size=length, max_size=length))
        self.ids += 1
        request = make_request(
            str(self.ids),
            prompt,
            tenant=data.draw(st.sampled_from(TENANTS)),
            read_cache=data.draw(st.sampled_from([True, True, True, False])),
        )
        self._start(data, request)

    @rule(families=st.lists(st.integers(0, 3), min_size=1, max_size=3), alone=st.booleans())
    def visit(self, families: list[int], *, alone: bool) -> None:
        """Prompts that are computed in one step and leave their blocks to the cache."""
        if alone:
            self._all_leave()
        requests = []
        for family in families:
            requests += self._arrive(family, length=2 * self.size + 1)
        self.step()
        for request in requests:
            self.manager.free(request)
            self._lost(request, over=True)

    @precondition(lambda self: self.running)
    @rule(rounds=st.integers(1, 3), token=TOKENS)
    def decode(self, rounds: int, token: int) -> None:
        """Everyone gets on by one token a step."""
        for _ in range(rounds):
            self.step()
            for index, request in enumerate(self.running.values()):
                if request.computed == len(request.tokens):
                    request.tokens.append((token + index) % 3)
                self._grow(request, 1, reserve=0)

    @rule(families=st.lists(st.integers(0, 3), min_size=1, max_size=3))
    def return_together(self, families: list[int]) -> None:
        """Prompts that begin in the step being planned, some of them from either cache."""
        for family in families:
            self._arrive(family, length=2 * self.size + 2)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), family=st.integers(0, 3))
    def part(self, data: st.DataObject, family: int) -> None:
        """Forks part: one copies, the other leaves in the same step, and somebody else wants a block."""
        parent = self._idle(data)
        if parent.computed < len(parent.tokens):
            return
        self.ids += 1
        child = make_request(str(self.ids), parent.tokens, tenant=parent.tenant)
        self.manager.fork(parent, child)
        self._runs(child, self.tables[parent.request_id][: -(-parent.computed // self.size)], parent.computed, 0)
        self._append(parent, 2, reserve=0)
        self.manager.free(child)
        self._lost(child, over=True)
        self._arrive(family, length=2 * self.size + 1)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def start_over(self, data: st.DataObject) -> None:
        self._start(data, self.waiting.pop(data.draw(st.sampled_from(sorted(self.waiting)))))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        request = self._idle(data)
        if request.computed == len(request.tokens):
            request.tokens.append(data.draw(TOKENS))
        count = data.draw(st.integers(1, len(request.tokens) - request.computed))
        self._grow(request, count, reserve=data.draw(st.sampled_from([0, 0, len(request.tokens) + 3])))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = self.running[data.draw(st.sampled_from(sorted(self.running)))]
        if parent.computed < len(parent.tokens):
            return
        free = self.manager.free_blocks
        self.ids += 1
        child = make_request(str(self.ids), parent.tokens, tenant=parent.tenant)
        self.manager.fork(parent, child)
        child.computed = parent.computed
        assert self.manager.free_blocks == free
        self.running[child.request_id] = child
        self.tables[child.request_id] = self.tables[parent.request_id][: -(-child.computed // self.size)]
        if parent.request_id in self.planned:
            self.planned[child.request_id] = (child.computed, 0)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), over=st.booleans())
    def leave(self, data: st.DataObject, *, over: bool) -> None:
        request = self._idle(data)
        self.manager.free(request)
        self._lost(request, over=over)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        request = self._idle(data)
        before = self._snapshot()
        if not self.manager.swap_out(request):
            assert self._snapshot() == before
            return
        assert self.manager.table(request.request_id) == []
        assert self.manager.swapped_tokens(request.request_id) == request.computed
        self.swapped[request.request_id] = self.running.pop(request.request_id)
        del self.tables[request.request_id]

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        request = self.swapped[data.draw(st.sampled_from(sorted(self.swapped)))]
        if not self.manager.trusts(request):
            return
        count = data.draw(st.integers(0, len(request.tokens) - request.computed))
        table = self._whole_or_nothing(lambda: self.manager.swap_in(request, count))
        if table is None:
            return
        self._runs(request, table, request.computed, count)
        del self.swapped[request.request_id]

    @precondition(lambda self: self.swapped)
    @rule(data=st.data(), over=st.booleans())
    def drop_swapped(self, data: st.DataObject, *, over: bool) -> None:
        request = self.swapped.pop(data.draw(st.sampled_from(sorted(self.swapped))))
        (self.manager.free if over else self.manager.drop_swapped)(request)
        request.computed = 0
        if not over:
            self.waiting[request.request_id] = request

    # ------------------------------------------------------------------------------------------------- between steps

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        self.step()
        request = self._idle(data)
        self.manager.distrust([request])
        self.manager.free(request)
        self._lost(request, over=True)

    @rule(rarely=st.integers(0, 5))
    def reset(self, rarely: int) -> None:
        if rarely:
            return
        self.step()
        assert self.manager.reset_prefix_cache() == (not self.running and not self.swapped)

    @rule()
    def step(self) -> None:
        self.memory.clear(self.manager.take_scrub())
        self.memory.apply(self.manager.take_transfers())
        for request_id, (start, count) in self.planned.items():
            request, table = self.running[request_id], self.tables[request_id]
            for position in range(start, start + count):
                before = self.memory.read(table, position - 1) if position else self._root(request)
                self.memory.write(table, position, fold(before, request.tokens[position]))
        self.planned = {}
        for request in self.running.values():
            self._reads_its_own(request)
        filled = {
            (self.tables[request.request_id][position // self.size], position % self.size)
            for request in self.running.values()
            for position in range(request.computed)
        }
        used = self.manager.pool.used * self.size
        assert self.manager.empty_slots == used - len(filled)
        assert self.manager.useful_share == (pytest.approx(len(filled) / used) if used else None)

    # -------------------------------------------------------------------------------------------------------- always

    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        for request_id, table in self.tables.items():
            assert self.manager.table(request_id) == table
        for event in self.manager.take_events():
            if isinstance(event, BlockStored):
                assert not self.indexed & set(event.block_hashes)
                self.indexed |= set(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                assert self.indexed >= set(event.block_hashes)
                self.indexed -= set(event.block_hashes)
            else:
                self.indexed.clear()
        assert self.indexed == set(self.manager.pool.index._blocks)

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.step()
        for request in list(self.swapped.values()):
            for other in list(self.running.values()):
                self.manager.free(other)
                self._lost(other, over=True)
            self.step()
            if self.manager.trusts(request):
                table = self.manager.swap_in(request, 0)
                assert table is not None, "an empty pool cannot hold what it held before"
                self._runs(request, table, request.computed, 0)
                self.step()
            else:
                self.manager.drop_swapped(request)
            del self.swapped[request.request_id]
        for request in self.running.values():
            self.manager.free(request)
        assert not self.manager.take_transfers()
        assert self.manager.free_blocks == self.manager.pool.usable
        assert self.manager.host.used == 0
        assert self.manager.reset_prefix_cache()
        self.manager.check_integrity()

    # ------------------------------------------------------------------------------------------------------- helpers

    def _start(self, data: st.DataObject, request: Request) -> None:
        match = self.manager.match(request)
        assert match.tokens < len(request.tokens)
        assert not (match.tokens and not request.read_cache)
        count = data.draw(st.integers(0 if match.tokens else 1, len(request.tokens) - match.tokens))
        reserve = data.draw(st.sampled_from([0, 0, len(request.tokens) + 5]))
        keep_free = data.draw(st.sampled_from([0, 0, 1]))
        waking = sum(1 for block in match.device if block.refs == 0)
        fresh = -(-max(match.tokens + count, reserve) // self.size) - len(match.device)
        fits = fresh + waking + keep_free <= self.manager.free_blocks
        table = self._whole_or_nothing(
            lambda: self.manager.allocate(request, count, match, keep_free=keep_free, reserve=reserve)
        )
        assert (table is not None) == fits
        if table is None:
            return
        self._runs(request, table, match.tokens, count)

    def _arrive(self, family: int, length: int) -> list[Request]:
        """A request of one of few prompts, computed whole; none if it does not fit."""
        self.ids += 1
        request = make_request(str(self.ids), [family] * length, tenant=TENANTS[0])
        match = self.manager.match(request)
        count = length - match.tokens
        table = self._whole_or_nothing(lambda: self.manager.allocate(request, count, match))
        if table is None:
            return []
        self._runs(request, table, match.tokens, count)
        return [request]

    def _runs(self, request: Request, table: list[int], start: int, count: int) -> None:
        request.computed = start + count
        self.running[request.request_id] = request
        self.tables[request.request_id] = list(table)
        if count:
            self.planned[request.request_id] = (start, count)

    def _idle(self, data: st.DataObject) -> Request:
        """A running request that the step being planned does not compute."""
        if self.running.keys() <= self.planned.keys():
            self.step()
        return self.running[data.draw(st.sampled_from(sorted(self.running.keys() - self.planned.keys())))]

    def _append(self, request: Request, token: int, *, reserve: int) -> None:
        request.tokens.append(token)
        self._grow(request, 1, reserve=reserve)

    def _grow(self, request: Request, count: int, *, reserve: int) -> None:
        new = self._whole_or_nothing(lambda: self.manager.allocate(request, count, reserve=reserve))
        if new is None:
            return
        replaced = self.manager.take_replaced(request.request_id)
        table = self.tables[request.request_id]
        if replaced is not None:
            index, block = replaced
            assert index == request.computed // self.size
            assert request.computed % self.size, "a full block was copied"
            table[index] = block
        table += new
        self.planned[request.request_id] = (request.computed, count)
        request.computed += count

    def _all_leave(self) -> None:
        self.step()
        for request in list(self.running.values()):
            self.manager.free(request)
            self._lost(request, over=True)

    def _lost(self, request: Request, *, over: bool) -> None:
        assert self.manager.table(request.request_id) == []
        del self.running[request.request_id]
        del self.tables[request.request_id]
        request.computed = 0
        if not over:
            self.waiting[request.request_id] = request

    def _whole_or_nothing(self, allocate: Callable[[], list[int] | None]) -> list[int] | None:
        before = self._snapshot()
        taken = allocate()
        if taken is None:
            assert self._snapshot() == before
        return taken

    def _snapshot(self) -> object:
        manager = self.manager
        return (
            [(block.refs, block.key) for block in (*manager.pool.blocks, *manager.host.blocks)],
            [block.block_id for block in manager.pool.free],
            [block.block_id for block in manager.host.free],
            {request_id: manager.table(request_id) for request_id in self.tables},
            (manager.copied, manager.offloaded, manager.swapped_out, manager.swapped_in),
        )

    def _root(self, request: Request) -> int:
        return TENANTS.index(request.tenant) + 1

    def _reads_its_own(self, request: Request) -> None:
        digest, table = self._root(request), self.tables[request.request_id]
        for position in range(request.computed):
            digest = fold(digest, request.tokens[position])
            assert self.memory.read(table, position) == digest, f"foreign KV at {position} of {request.request_id}"


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


def test_the_order_of_the_groups_matters_to_that_memory() -> None:
    """Control: what is moved out and in again within one step is lost if it is moved in first."""
    memory = KVMemory(1)
    memory.write([1], 0, 42)
    memory.apply(Transfers(swap_out=((1, 0),), swap_in=((0, 2),), copies=((2, 3),)))
    assert [memory.read([block], 0) for block in (1, 2, 3)] == [42, 42, 42]
    with pytest.raises(AssertionError, match="never written"):
        memory.apply(Transfers(swap_in=((5, 4),)))
        memory.read([4], 0)
