"""Whole blocks move between device and host memory in the order that a plan states."""

from __future__ import annotations

import torch

from dataplane.memory.kv_store import KVStore
from dataplane.models.shape import ModelShape
from dataplane.scheduling.plan import Transfers

BLOCK, BLOCKS, HOST = 4, 8, 5


def shape() -> ModelShape:
    return ModelShape("llama", 2, 48, 6, 2, 8, 64, 32, 2048, 1e-5, 1e4, None, True, (2,))


def filled() -> KVStore:
    """Every block of every tensor holds contents of its own; host blocks too."""
    store, generator = KVStore(shape(), BLOCKS, BLOCK, HOST), torch.Generator().manual_seed(1)
    for tensor in (*store.keys, *store.values, *store.host_keys, *store.host_values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return store


def contents(store: KVStore) -> tuple[torch.Tensor, torch.Tensor]:
    """Device and host blocks, each [blocks, tensors · H_k · block_size · d]."""
    device, host = (*store.keys, *store.values), (*store.host_keys, *store.host_values)
    return tuple(torch.stack(list(side)).transpose(0, 2).flatten(1) for side in (device, host))  # type: ignore[return-value]


def test_blocks_go_out_and_come_back_whole_and_touch_no_other() -> None:
    store = filled()
    device, host = contents(store)
    store.move(Transfers(swap_out=((3, 1), (6, 4))))
    after_device, after_host = contents(store)
    assert torch.equal(after_device, device)
    assert torch.equal(after_host, torch.stack([host[0], device[3], host[2], host[3], device[6]]))
    store.clear([3, 6])
    store.move(Transfers(swap_in=((1, 7), (4, 3))))
    back, _ = contents(store)
    assert torch.equal(back[7], device[3])
    assert torch.equal(back[3], device[6])
    assert not back[6].any()
    assert torch.equal(back[[0, 1, 2, 4, 5]], device[[0, 1, 2, 4, 5]])


def test_out_comes_before_in_and_in_before_copies() -> None:
    store = filled()
    device, host = contents(store)
    store.move(Transfers(swap_out=((2, 0),), swap_in=((3, 2), (0, 5)), copies=((2, 4), (5, 6))))
    after, after_host = contents(store)
    assert torch.equal(after_host[0], device[2])
    assert torch.equal(after[2], host[3])
    assert torch.equal(after[4], host[3])
    assert torch.equal(after[5], device[2])
    assert torch.equal(after[6], device[2])


def test_the_pairs_of_one_list_act_one_after_the_other() -> None:
    store = filled()
    device, host = contents(store)
    store.move(Transfers(swap_out=((1, 0), (2, 0)), swap_in=((3, 5), (4, 5)), copies=((1, 2), (2, 3), (1, 2), (7, 1))))
    after, after_host = contents(store)
    assert torch.equal(after_host[0], device[2])
    assert torch.equal(after[5], host[4])
    assert torch.equal(after[2], device[1])
    assert torch.equal(after[3], device[1])
    assert torch.equal(after[1], device[7])


def test_host_memory_is_counted_apart_and_absent_by_default() -> None:
    store = filled()
    block = BLOCK * shape().kv_bytes_per_token
    assert store.nbytes == BLOCKS * block
    assert sum(tensor.nbytes for tensor in (*store.host_keys, *store.host_values)) == HOST * block
    assert not any(tensor.numel() for tensor in KVStore(shape(), BLOCKS, BLOCK).host_keys)
