"""Blocks of a manager as numbers."""

from __future__ import annotations

from dataplane.memory.manager import KVManager
from dataplane.request import Request

COMMON = [token for token in range(3) for _ in range(16)]


def start(manager: KVManager, request: Request) -> tuple[list[int], list[int]]:
    """Match and allocate a whole prompt: device hits, new block ids (those of host hits first)."""
    match = manager.match(request)
    taken = manager.allocate(request, request.wanted - match.tokens, match)
    assert taken is not None
    request.computed = request.wanted
    manager.check_integrity()
    return [block.block_id for block in match.device], taken[len(match.device) :]


def append(manager: KVManager, request: Request, *tokens: int) -> list[int]:
    """Decode `tokens`, one step each: blocks appended."""
    new = []
    for token in tokens:
        request.tokens.append(token)
        taken = manager.allocate(request, 1)
        assert taken is not None
        request.computed += 1
        new += taken
    manager.check_integrity()
    return new


def free_order(manager: KVManager) -> list[int]:
    return [block.block_id for block in manager.pool.free]


def key(manager: KVManager, block_id: int) -> bytes | None:
    return manager.pool.blocks[block_id].key
