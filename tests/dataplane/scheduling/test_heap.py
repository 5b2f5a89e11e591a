"""The heap behind the queue orders: sorted order after any changes, and no memory of what is gone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dataplane.scheduling.heap import LazyHeap

CHANGES = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.none() | st.integers(-3, 3)))


@given(CHANGES)
def test_it_is_a_sorted_list_after_any_puts_and_removals(changes: list[tuple[str, int | None]]) -> None:
    heap: LazyHeap[str] = LazyHeap()
    plain: dict[str, tuple[int, int]] = {}
    for serial, (name, key) in enumerate(changes):
        if key is not None:
            heap.put(name, (key,), name)
            plain[name] = (key, serial)
        elif name in plain:
            assert heap.remove(name) == name
            del plain[name]
        expected = sorted(plain, key=lambda name: plain[name])
        assert list(heap) == expected
        assert heap.first() == (expected[0] if expected else None)
        assert all(heap.key(name) == (plain[name][0],) and heap.get(name) == name for name in plain)
        assert len(heap) == len(plain) and all(name in heap for name in plain)


def test_what_is_re_keyed_below_the_top_is_cleared_away() -> None:
    heap: LazyHeap[str] = LazyHeap()
    heap.put("top", (0,), "top")
    for key in range(1, 10_000):
        heap.put("other", (key,), "other")
    assert len(heap._entries) < 50
    for key in range(10_000):
        heap.put(str(key), (key + 1,), str(key))
        heap.remove(str(key))
    assert len(heap._entries) < 50
    assert list(heap) == ["top", "other"]
