"""Which limits apply to a request, and how high they are while raises hold."""

from __future__ import annotations

from controlplane.quotas.limits import LimitIndex, effective, falls, lasting, limits_for, lowest, next_change
from controlplane.quotas.schemas import Limit, QuotaKind, QuotaLevel, Raise, TenantQuotas


def limit(name: str, level: QuotaLevel, scope: str, model: str = "", **values: object) -> Limit:
    values.setdefault("hard", 10)
    return Limit(quota_id=name, level=level, scope_id=scope, model=model, kind=QuotaKind.TOKENS_PER_DAY, **values)  # type: ignore[arg-type]


QUOTAS = TenantQuotas(
    tenant_id="t",
    tenant="acme",
    time_zone="UTC",
    limits=(
        limit("key", QuotaLevel.KEY, "k"),
        limit("other key", QuotaLevel.KEY, "k2"),
        limit("tenant", QuotaLevel.TENANT, "t"),
        limit("tenant, m", QuotaLevel.TENANT, "t", "m"),
        limit("tenant, n", QuotaLevel.TENANT, "t", "n"),
        limit("project", QuotaLevel.PROJECT, "p"),
        limit("other project", QuotaLevel.PROJECT, "p2"),
        limit("project named as the key", QuotaLevel.PROJECT, "k"),
    ),
    prices=(),
    epoch=7,
)


def test_limits_of_every_level_apply_and_those_of_the_model_beside_those_of_any() -> None:
    def found(model: str) -> list[str]:
        return [each.quota_id for each in limits_for(QUOTAS, project_id="p", identity="k", model=model)]

    assert found("m") == ["tenant", "tenant, m", "project", "key"]
    assert found("z") == ["tenant", "project", "key"]
    alone = LimitIndex(QUOTAS).limits_for(project_id="p9", identity="k9", model="n")
    assert [each.quota_id for each in alone] == ["tenant", "tenant, n"]


def test_a_raise_holds_from_its_start_until_before_its_end_and_several_add_up() -> None:
    raised = limit(
        "x",
        QuotaLevel.TENANT,
        "t",
        soft=8,
        raises=(
            Raise(amount=5, starts_at=100.0, expires_at=200.0),
            Raise(amount=7, starts_at=150.0, expires_at=300.0),
        ),
    )
    expected = {99.9: (8, 10), 100.0: (13, 15), 150.0: (20, 22), 199.9: (20, 22), 200.0: (15, 17), 300.0: (8, 10)}
    assert {now: effective(raised, now) for now in expected} == expected
    assert [falls(raised, *span) for span in ((0, 199), (120, 160), (120, 250), (160, 200), (200, 300))] == [
        False,
        False,
        False,
        True,
        True,
    ]
    assert lasting(raised, 160, 170) == (20, 22)
    assert lasting(raised, 160, 250) == (20, 17)
    assert lasting(raised, 160, 400) == (20, 10)
    spans = ((0, 120), (120, 160), (120, 250), (160, 200), (160, 250), (160, 400), (400, 900))
    assert [lowest(raised, *span) for span in spans] == [10, 15, 15, 22, 17, 10, 10]
    assert [next_change([raised], now) for now in (0, 100, 250, 300)] == [100.0, 150.0, 300.0, None]


def test_a_side_that_is_not_set_is_not_raised_into_being() -> None:
    raises = (Raise(amount=5, starts_at=0.0, expires_at=9.0),)
    assert effective(limit("x", QuotaLevel.TENANT, "t", raises=raises), 1.0) == (None, 15)
    assert effective(limit("x", QuotaLevel.TENANT, "t", hard=None, soft=3, raises=raises), 1.0) == (8, None)
    assert lowest(limit("x", QuotaLevel.TENANT, "t", hard=None, soft=3, raises=raises), 1.0, 2.0) is None
