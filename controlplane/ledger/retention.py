"""How long the ledger keeps what, and how late a record may come.

Layer: service. Only numbers. An attempt is never stored twice because its claim outlives every repeat: a record is
stored until `OLDEST_RECORD_S` after it finished, a claim is kept `CLAIMS_KEPT_S` after it was made. A repeat that found
the claim gone would have to say that the attempt finished 45 days after it was stored.
"""

from __future__ import annotations

DAY_S = 86_400
OLDEST_RECORD_S = 45 * DAY_S
"""A record that finished longer ago is set aside: nothing could tell any more whether it was stored before."""
MOST_AHEAD_S = DAY_S
"""A record may have finished this far in the future: clocks differ."""
CLAIMS_KEPT_S = 2 * OLDEST_RECORD_S
DAYS_KEPT = 430
"""Days of rows and sums: 13 months and the longest span of one total."""
DAYS_AHEAD = 14
"""Days whose partitions are made before they begin: so long may all workers be away before the default is used."""
