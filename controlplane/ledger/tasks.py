"""Background jobs of the ledger: partitions ahead, retention, and the proof that sums and rows agree.

Layer: service. Each run is one transaction; running twice or in two workers changes nothing more (F38, F39).
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta

from sqlalchemy.exc import DBAPIError

from controlplane.ledger import service
from controlplane.worker import ExpectedEnd, Job, JobContext

log = logging.getLogger("tidegate.ledger")

PARTITIONS_S = 600.0
CLAIMS_S = 600.0
CHECK_S = 3600.0
BATCH = 5_000
LOCK_NOT_AVAILABLE = "55P03"
MOST_PARTITIONS = 20
"""Partitions one run makes or drops at most: each is a short lock."""


async def keep_partitions(context: JobContext) -> None:
    """Make and drop a bounded number, and start over at once while there is more."""
    try:
        changed = await service.keep_partitions(context.session, context.now, most=MOST_PARTITIONS)
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) != LOCK_NOT_AVAILABLE:
            raise
        raise ExpectedEnd("a partition is in use; the next run tries again") from error
    if changed is None:
        raise ExpectedEnd("another run keeps the partitions")
    if changed.left_in_default:
        log.error("%d rows of the ledger stay in the default partition: too many to move", changed.left_in_default)
    if max(len(changed.made), len(changed.dropped)) >= MOST_PARTITIONS:
        context.publish(KEEP_PARTITIONS)


async def forget_claims(context: JobContext) -> None:
    """Delete a bounded batch, and start over at once while there is more."""
    if await service.forget_claims(context.session, limit=BATCH) >= BATCH:
        context.publish(FORGET_CLAIMS)


async def check_sums(context: JobContext) -> None:
    """Compare yesterday's sums with its rows. It only reads."""
    today = datetime.fromtimestamp(context.now, UTC).date()
    for one in await service.check_sums(context.session, today - timedelta(days=1), today):
        log.error(
            "the ledger's sums are wrong: %s tenant %s key %s model %s: %d tokens in rows, %d in the sum",
            one.day, one.tenant, one.key_id, one.model, one.ledger_tokens, one.daily_tokens,
        )  # fmt: skip


KEEP_PARTITIONS = "ledger.keep_partitions"
FORGET_CLAIMS = "ledger.forget_claims"
CHECK_SUMS = "ledger.check_sums"

JOBS = (
    Job(KEEP_PARTITIONS, keep_partitions, every_s=PARTITIONS_S),
    Job(FORGET_CLAIMS, forget_claims, every_s=CLAIMS_S),
    Job(CHECK_SUMS, check_sums, every_s=CHECK_S),
)
