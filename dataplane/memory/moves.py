"""The whole blocks to be moved before the step that is being planned.

Layer: state and memory. Pure. It only collects; the manager holds what a move still reads, so that nothing is
written over before the step has moved it.

The executor runs them grouped: out, in, copies. What makes that right, whatever the order in which they were asked:
- out: its source holds its contents since an earlier step. One whose contents come with this step is not moved out.
- in: its source stays held until the step is taken, so no move out can be given the same host block after it.
- copies: likewise its source on the device. So no block is both read and written by the copies of one step, and
  within each group the order does not matter.
Of two moves to one block the later counts: the earlier one's block was given back in between.
"""

from __future__ import annotations

from dataplane.scheduling.plan import Transfers

NONE = Transfers()


class MoveLog:
    """Collects moves until they are taken."""

    def __init__(self) -> None:
        self._out: dict[int, int] = {}
        self._in: dict[int, int] = {}
        self._copies: dict[int, int] = {}

    def settled(self, device: int) -> bool:
        """Whether a device block does not wait for a move to fill it."""
        return device not in self._in and device not in self._copies

    def out(self, device: int, host: int) -> None:
        """Copy a settled device block to host memory."""
        self._out[host] = device

    def bring(self, host: int, device: int) -> None:
        """Copy a host block, which is held until `take`, to the device."""
        self._copies.pop(device, None)
        self._in[device] = host

    def copy(self, source: int, target: int) -> None:
        """Copy a device block, which is held until `take`. A copy of a copy is taken from the first source."""
        self._in.pop(target, None)
        self._copies[target] = self._copies.get(source, source)

    def take(self) -> Transfers:
        """Everything since the last call."""
        if not (self._out or self._in or self._copies):
            return NONE
        taken = Transfers(
            swap_out=tuple((device, host) for host, device in self._out.items()),
            swap_in=tuple((host, device) for device, host in self._in.items()),
            copies=tuple((source, target) for target, source in self._copies.items()),
        )
        self._out, self._in, self._copies = {}, {}, {}
        return taken
