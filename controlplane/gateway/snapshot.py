"""The last policy on disk, so that a gateway can start and serve known keys without Postgres.

Layer: service. One file, signed with a key derived from the session secret, written whole or not at all, readable by
its owner only. A file that was tampered with, belongs to another gateway or is older than what this process has
already seen is refused. It holds hashes of secrets, never secrets.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import os
import time
from pathlib import Path

import msgspec
from msgspec import structs

from controlplane.fleet.schemas import FleetView
from controlplane.gateway.auth import KeyDirectory
from controlplane.gateway.fleet import FleetDirectory
from controlplane.gateway.quotas import QuotaDirectory
from controlplane.gateway.table import PolicyTable
from controlplane.quotas.schemas import Price, TenantQuotas
from controlplane.settings import Secret
from controlplane.slo.schemas import Slo
from controlplane.tenants.schemas import KeyGrant

MAGIC = b"tidegate-policy-1\n"
PURPOSE = b"tidegate policy snapshot"
SAVE_EVERY_S = 2.0
MAX_BYTES = 64 * 1024 * 1024

logger = logging.getLogger("tidegate.gateway")


class SnapshotRefusedError(Exception):
    """The file must not be used; the message says why in one sentence."""


class PolicySnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All a gateway needs to know, as of policy `epoch`."""

    epoch: int
    gateway: str
    written_at: float
    grants: list[KeyGrant]
    fleet: FleetView | None = None
    quotas: list[TenantQuotas] = []
    """Without prices, which are every tenant's."""
    prices: tuple[Price, ...] = ()
    slos: tuple[Slo, ...] = ()
    """Objectives in force."""


class SnapshotFile:
    """Reads and writes the one file. `path`'s folder is made when needed."""

    def __init__(self, path: Path, gateway: str, secret: Secret) -> None:
        self.path = path
        self.gateway = gateway
        self._key = hmac.digest(secret.reveal().encode(), PURPOSE, "sha256")
        self._epoch = -1
        """The newest epoch this process has written or read."""

    def load(self, *, not_before: int = 0) -> PolicySnapshot | None:
        """The snapshot, or None when there is none. Raises SnapshotRefusedError, also for an epoch below
        `not_before`.
        """
        try:
            with self.path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SnapshotRefusedError(f"the policy snapshot cannot be read: {error.strerror}") from error
        header = len(MAGIC) + hashlib.sha256().digest_size
        payload = content[header:]
        if len(content) > MAX_BYTES or not content.startswith(MAGIC):
            raise SnapshotRefusedError("the policy snapshot is not one of this version")
        if not hmac.compare_digest(content[len(MAGIC) : header], self._sign(payload)):
            raise SnapshotRefusedError("the policy snapshot's signature is wrong")
        try:
            snapshot = msgspec.msgpack.decode(payload, type=PolicySnapshot)
        except msgspec.DecodeError as error:
            raise SnapshotRefusedError("the policy snapshot cannot be decoded") from error
        if snapshot.gateway != self.gateway:
            raise SnapshotRefusedError("the policy snapshot belongs to another gateway")
        if snapshot.epoch < max(not_before, self._epoch):
            raise SnapshotRefusedError(f"the policy snapshot is of epoch {snapshot.epoch}, a newer one was seen")
        self._epoch = snapshot.epoch
        return snapshot

    def save(self, snapshot: PolicySnapshot) -> None:
        """Replace the file; what Postgres said last is the newest there is. Raises OSError when the disk fails."""
        payload = msgspec.msgpack.encode(snapshot)
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = self.path.with_suffix(".new")
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(MAGIC + self._sign(payload) + payload)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        self._epoch = snapshot.epoch

    def _sign(self, payload: bytes) -> bytes:
        return hmac.digest(self._key, MAGIC + payload, "sha256")


class SnapshotKeeper:
    """Takes policy from the file at start and writes it back after `changed` is set. `run` ends only by cancellation.

    Between two writes lie at least `SAVE_EVERY_S`; a key whose change was announced leaves the file with the next one.
    """

    def __init__(
        self,
        file: SnapshotFile,
        *,
        keys: KeyDirectory,
        fleet: FleetDirectory,
        quotas: QuotaDirectory,
        slos: PolicyTable[tuple[Slo, ...]],
        changed: asyncio.Event,
    ) -> None:
        self._file = file
        self._keys = keys
        self._fleet = fleet
        self._quotas = quotas
        self._slos = slos
        self._changed = changed
        self._failing = False

    def restore(self) -> None:
        """Start from the file; a refused one is left alone, and said so."""
        try:
            snapshot = self._file.load()
        except SnapshotRefusedError as error:
            logger.error("Starting without the last policy: %s", error)  # noqa: TRY400  # the cause is in the sentence
            return
        if snapshot is None:
            return
        self._keys.adopt(snapshot.grants)
        self._quotas.adopt(structs.replace(one, prices=snapshot.prices) for one in snapshot.quotas)
        self._slos.restore(snapshot.slos)
        if snapshot.fleet is not None:
            self._fleet.adopt(snapshot.fleet)
        logger.info("Took the policy of epoch %d from disk, with %d keys", snapshot.epoch, len(snapshot.grants))

    async def run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await asyncio.to_thread(self.save, self.snapshot())
            await asyncio.sleep(SAVE_EVERY_S)

    def snapshot(self) -> PolicySnapshot:
        """Policy as this process knows it now."""
        view, quotas = self._fleet.view, self._quotas.known()
        newest = max(quotas, key=lambda one: one.epoch, default=None)
        return PolicySnapshot(
            epoch=view.epoch if view else 0,
            gateway=self._file.gateway,
            written_at=time.time(),
            grants=[grant for grant in self._keys.known() if not grant.revoked],
            fleet=view,
            quotas=[structs.replace(one, prices=()) for one in quotas],
            prices=newest.prices if newest is not None else (),
            slos=self._slos.known or (),
        )

    def save(self, snapshot: PolicySnapshot) -> None:
        """Write; a failing disk is said once and tried again with the next change."""
        try:
            self._file.save(snapshot)
        except OSError as error:
            if not self._failing:
                logger.error("The policy snapshot cannot be written: %s", error.strerror)  # noqa: TRY400  # the cause is in the sentence
            self._failing = True
        else:
            self._failing = False
