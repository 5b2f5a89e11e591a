"""How the policy's holders and changes read on their page. Layer: service. Pure: it never queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from controlplane.console import presenters
from controlplane.policy.skew import Skew
from controlplane.policy.views import ChangeView, HolderView, PolicyObject

STATES = {
    Skew.CURRENT: ("Current", "ok", "check"),
    Skew.SETTLING: ("Settling", "info", "loader"),
    Skew.BEHIND: ("Behind", "bad", "warning"),
    Skew.AHEAD: ("Ahead of the database", "bad", "warning"),
    Skew.SILENT: ("Silent", "warn", "unplugged"),
}
"""Word, tone and icon of each state."""
NOUNS = {
    PolicyObject.TENANTS: "Tenant",
    PolicyObject.QUOTAS: "Limit",
    PolicyObject.GRANTS: "Raise",
    PolicyObject.PRICES: "Price",
    PolicyObject.SLOS: "Objectives",
}
UNTOLD = frozenset({"id", "tenant_id", "project_id", "quota_id", "created_at", "updated_at", "slug", "tenant"})
"""Fields that say nothing new beside the row's name."""
MONEY = frozenset({"hard", "soft", "local"})
"""Fields of a limit that are in micro-units where it limits money."""
LONGEST = 120


@dataclass(frozen=True, slots=True)
class HolderRow:
    """One gateway or replica: `since` says for how long it is in its state, empty when it is current."""

    name: str
    kind: str
    epoch: int
    behind: int
    label: str
    tone: str
    icon: str
    since: str
    report_age: str


@dataclass(frozen=True, slots=True)
class ChangeRow:
    """One change; `fields` are (name, before, after)."""

    view: ChangeView
    noun: str
    what: str
    fields: list[tuple[str, str, str]]


def holder_row(view: HolderView) -> HolderRow:
    """A holder as the page shows it."""
    label, tone, icon = STATES[view.state]
    return HolderRow(
        name=view.name,
        kind=view.kind.value,
        epoch=view.epoch,
        behind=view.behind,
        label=label,
        tone=tone,
        icon=icon,
        since="" if view.for_s is None else duration(view.for_s),
        report_age=duration(view.report_age_s),
    )


def change_row(view: ChangeView) -> ChangeRow:
    """A change as the page shows it: what differs, or all of what was made or removed."""
    before, after = _flat(view.before or {}), _flat(view.after or {})
    counts_money = str((view.after or view.before or {}).get("kind", "")).startswith("money")
    what = "made" if view.before is None else "removed" if view.after is None else "changed"
    names = [name for name in {**after, **before} if name not in UNTOLD and before.get(name) != after.get(name)]
    return ChangeRow(
        view=view,
        noun=NOUNS[view.object],
        what=what,
        fields=[_field(name, before.get(name), after.get(name), counts_money) for name in names],
    )


def duration(seconds: float) -> str:
    """Whole seconds, minutes, hours or days."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """The row's fields; one that holds fields of its own is told field by field."""
    fields: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            fields |= {f"{name} {inner}": each for inner, each in value.items()}
        else:
            fields[name] = value
    return fields


def _field(name: str, before: Any, after: Any, counts_money: bool) -> tuple[str, str, str]:
    shown = _money if counts_money and name in MONEY else _text
    return name.replace("_", " "), shown(before), shown(after)


def _money(value: Any) -> str:
    return f"{presenters.money(value)} units of money" if isinstance(value, int) else _text(value)


def _text(value: Any) -> str:
    if value is None or value in ("", []):
        return "—"
    text = _words(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(_words(each) for each in value)
    return f"{value:,}" if isinstance(value, int) else str(value)
