"""The order by prefix hits: hits first, in proportion, and no miss waits for ever."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from dataplane.request import Request
from dataplane.scheduling.cache_order import CacheOrder
from dataplane.scheduling.config import QueueOrder, SchedulerConfig
from dataplane.scheduling.queues import make_queue
from tests.factories.requests import make_request


class Cache:
    """What the prefix cache holds of each request, as a share of its tokens; it counts how often it is asked."""

    def __init__(self) -> None:
        self.ratios: dict[str, float] = {}
        self.asked = 0

    def __call__(self, request: Request) -> float:
        self.asked += 1
        return self.ratios.get(request.request_id, 0.0)

    def request(self, name: str, ratio: float) -> Request:
        self.ratios[name] = ratio
        return make_request(name, [1])


def gap_limit(group: int, groups: int) -> int:
    """Admissions within which one of `group` must be, while it has somebody waiting."""
    return groups * (groups + 1) // 2 // group + groups


def test_groups_are_served_in_proportion_to_their_hits() -> None:
    cache = Cache()
    order = CacheOrder(cache, groups=4)
    for index in range(400):
        order.push(cache.request(str(index), index % 4 / 4))
    served = Counter(cache.ratios[order.pop().request_id] for _ in range(100))
    assert served == {0.0: 10, 0.25: 20, 0.5: 30, 0.75: 40}


def test_more_hits_go_first_and_a_whole_hit_is_the_top_group() -> None:
    cache = Cache()
    order = CacheOrder(cache)
    for name, ratio in (("miss", 0.0), ("half", 0.5), ("most", 0.89), ("all", 1.0)):
        order.push(cache.request(name, ratio))
    assert [order.pop().request_id for _ in range(4)] == ["all", "most", "half", "miss"]


def test_inside_a_group_it_is_first_come_first_served() -> None:
    cache = Cache()
    order = CacheOrder(cache)
    for name, queued in (("b", 2.0), ("c", 3.0), ("a", 1.0), ("b2", 2.0)):
        order.push(make_request(name, [1], queued=queued))
    assert [order.pop().request_id for _ in range(4)] == ["a", "b", "b2", "c"]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("groups", [1, 3, 10])
def test_no_group_that_waits_is_passed_over_for_longer_than_its_share(groups: int, seed: int) -> None:
    draw = random.Random(seed)
    cache = Cache()
    order = CacheOrder(cache, groups=groups)
    waited: Counter[int] = Counter()
    for step in range(5_000):
        # Mostly hits, more than are served: the groups of misses are never empty for want of arrivals only.
        for name in (f"{step}", f"{step}b")[: draw.choice((1, 2))]:
            order.push(cache.request(name, draw.betavariate(5, 1)))
        waiting = {index for index, group in enumerate(order._groups) if group}
        taken = min(int(cache.ratios[order.pop().request_id] * groups), groups - 1)
        for index in range(groups):
            waited[index] = waited[index] + 1 if index in waiting and index != taken else 0
            assert waited[index] < gap_limit(index + 1, groups)


def test_a_miss_is_served_however_many_hits_keep_coming() -> None:
    cache = Cache()
    order = CacheOrder(cache)
    order.push(cache.request("miss", 0.0))
    for index in range(gap_limit(1, 10)):
        order.push(cache.request(f"hit {index}", 1.0))
        if order.pop().request_id == "miss":
            break
    assert "miss" not in order._rated
    assert index >= 5  # and yet hits went before it


def test_what_became_a_hit_while_it_waited_moves_up_and_keeps_its_age() -> None:
    cache = Cache()
    order = CacheOrder(cache, looks=2)
    for index in range(6):
        order.push(cache.request(f"miss {index}", 0.0))
    order.push(cache.request("hit", 1.0))
    cache.ratios["miss 1"] = cache.ratios["miss 3"] = 1.0
    order.peek(1.0)  # looks at 0 and 1
    assert next(iter(order)).request_id == "miss 1"
    order.peek(1.0)  # the same step: no second look
    assert [request.request_id for request in order][:2] == ["miss 1", "hit"]
    order.peek(2.0)
    assert [request.request_id for request in order][:3] == ["miss 1", "miss 3", "hit"]
    cache.ratios["miss 3"] = 0.0
    for now in range(3, 10):
        order.peek(float(now))
    assert [request.request_id for request in order][:3] == ["miss 1", "miss 3", "hit"]


def test_a_cache_that_flickers_keeps_nobody_from_being_served() -> None:
    draw = random.Random(3)
    cache = Cache()
    order = CacheOrder(cache, groups=4)
    order.push(cache.request("patient", 0.0))
    for index in range(20 * gap_limit(1, 4)):
        order.push(cache.request(str(index), 0.99))
        cache.ratios["patient"] = draw.random() * 0.7
        order.peek(float(index))
        if order.pop().request_id == "patient":
            break
    # Three moves at the most, and after each at most one wait of its group.
    assert "patient" not in order._rated
    assert index < 4 * gap_limit(1, 4)


def test_walking_through_is_the_order_of_service() -> None:
    draw = random.Random(1)
    cache = Cache()
    queue = make_queue(SchedulerConfig(order=QueueOrder.CACHE_AWARE), hit_ratio=cache)
    for index in range(200):
        request = cache.request(str(index), draw.random())
        request.priority = index % 2
        queue.push(request)
        if index % 5 == 0:
            queue.pop()
        if index % 7 == 6:
            queue.remove(draw.choice(list(queue)))
    walked = list(queue)
    assert [queue.pop() for _ in range(len(queue))] == walked
    assert len(walked) > 100


def test_the_order_needs_a_cache_to_ask() -> None:
    with pytest.raises(ValueError, match="hit ratios"):
        make_queue(SchedulerConfig(order=QueueOrder.CACHE_AWARE))
