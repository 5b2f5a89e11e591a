"""The words after each kind of change, from what the services answered. Layer: service. Pure: it never queries."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from controlplane.console import presenters
from controlplane.console.flash import Flash
from controlplane.console.policy_rows import NOUNS
from controlplane.policy.views import ChangeView, PolicyObject
from controlplane.promptlog.schemas import PromptLogView
from controlplane.quotas.schemas import QuotaKind
from controlplane.quotas.views import GrantView, PriceView, QuotaRequestView, QuotaView, RequestState
from controlplane.slo.schemas import SloView
from controlplane.tenants.schemas import KeyView, PrincipalKind, PrincipalView, ProjectView, TenantView

UNITS = {
    QuotaKind.REQUESTS_PER_MINUTE: ("request", "a minute"),
    QuotaKind.TOKENS_PER_MINUTE: ("token", "a minute"),
    QuotaKind.INPUT_TOKENS_PER_MINUTE: ("input token", "a minute"),
    QuotaKind.UNCACHED_INPUT_TOKENS_PER_MINUTE: ("uncached input token", "a minute"),
    QuotaKind.OUTPUT_TOKENS_PER_MINUTE: ("output token", "a minute"),
    QuotaKind.CONCURRENT_REQUESTS: ("request", "at once"),
    QuotaKind.TOKENS_PER_DAY: ("token", "a day"),
    QuotaKind.TOKENS_PER_MONTH: ("token", "a month"),
    QuotaKind.MONEY_PER_DAY: ("money", "a day"),
    QuotaKind.MONEY_PER_MONTH: ("money", "a month"),
    QuotaKind.MAX_PROMPT_TOKENS: ("token", "a prompt"),
    QuotaKind.MAX_OUTPUT_TOKENS: ("token", "an answer"),
}
"""What one of each kind of limit is, and in which span."""
LONGEST = 60
"""Characters of a name; a longer one would hide what happened to it."""
WITHIN = "within two seconds"
"""How soon every gateway knows."""


def tenant_created(tenant: TenantView) -> Flash:
    return Flash(f"Tenant created: {_name(tenant.name)}")


def tenant_changed(tenant: TenantView, fields: Iterable[str]) -> Flash:
    return _changed("Tenant", tenant.name, fields)


def tenant_state(tenant: TenantView) -> Flash:
    return _state("Tenant", _name(tenant.name), tenant.active)


def project_created(project: ProjectView) -> Flash:
    return Flash(f"Project created: {_name(project.name)} of {project.tenant}")


def project_changed(project: ProjectView, fields: Iterable[str]) -> Flash:
    return _changed("Project", project.name, fields)


def project_state(project: ProjectView) -> Flash:
    return _state("Project", f"{_name(project.name)} of {project.tenant}", project.active)


def principal_created(owner: PrincipalView) -> Flash:
    return Flash(f"{_kind(owner)} created: {_name(owner.name)} of {owner.tenant}")


def principal_role(owner: PrincipalView) -> Flash:
    return Flash(f"Role set: {_name(owner.name)} of {owner.tenant} is {owner.role.value}")


def principal_state(owner: PrincipalView) -> Flash:
    return _state(_kind(owner), f"{_name(owner.name)} of {owner.tenant}", owner.active)


def key_revoked(key: KeyView) -> Flash:
    return Flash(f"Revoked “{_name(key.name)}”", f"Gateways refuse it {WITHIN}.")


def quota_set(quota: QuotaView) -> Flash:
    return _quota("Limit set", quota)


def quota_changed(quota: QuotaView) -> Flash:
    return _quota("Limit changed", quota)


def quota_removed(quota: QuotaView) -> Flash:
    return Flash(f"Limit removed: {_limited(quota)}")


def raised(quota: QuotaView, grant: GrantView) -> Flash:
    return Flash(f"Limit raised: {_more(quota, grant.amount)}", f"Until {_day(grant.expires_at)}.")


def raise_ended(quota: QuotaView, grant: GrantView) -> Flash:
    return Flash(f"Raise ended: {_more(quota, grant.amount)}")


def request_decided(asked: QuotaRequestView) -> Flash:
    """Of a request that is approved or declined."""
    if asked.state is not RequestState.APPROVED or asked.given is None:
        return Flash(f"Request declined: {_more(asked, asked.amount)}")
    until = "For good." if asked.given_until is None else f"Until {_day(asked.given_until)}."
    return Flash(f"Request approved: {_more(asked, asked.given)}", until)


def price_set(price: PriceView, *, planned: bool) -> Flash:
    begins = _day(price.valid_from) if planned else "now on"
    return Flash(f"Price set: {_pool(price)}", f"It applies from {begins}.")


def price_taken_back(price: PriceView) -> Flash:
    return Flash(f"Price taken back: {_pool(price)}", "The one before goes on in its place.")


def objectives_set(slo: SloView) -> Flash:
    told = [
        f"{name} ≤ {limit:,.9g} ms for {share * 100:.9g} %"
        for name, limit, share in (("TTFT", slo.ttft_ms, slo.ttft_share), ("TPOT", slo.tpot_ms, slo.tpot_share))
        if limit is not None and share is not None
    ]
    if slo.availability is not None:
        told.append(f"available for {slo.availability * 100:.9g} %")
    return Flash(f"Objectives set: {_held(slo)}", f"{', '.join(told)}.")


def objectives_state(slo: SloView) -> Flash:
    return Flash(f"Objectives {'enabled' if slo.enabled else 'disabled'}: {_held(slo)}")


def objectives_removed(slo: SloView) -> Flash:
    return Flash(f"Objectives removed: {_held(slo)}")


def rolled_back(change_id: int, made: ChangeView) -> Flash:
    """Of change `change_id`, which the change `made` took back."""
    of = f" {made.tenant}" if made.object is PolicyObject.TENANTS else f" of {made.tenant}" if made.tenant else ""
    return Flash(f"Change {change_id} rolled back: {NOUNS[made.object]}{of}", f"By change {made.id}.")


def prompt_log_on(log: PromptLogView) -> Flash:
    days = f"{log.retention_days} day{'' if log.retention_days == 1 else 's'}"
    return Flash(f"Prompt log on: {log.tenant}", f"Kept for {days}, {log.sample * 100:.9g} % of requests.")


def prompt_log_off(log: PromptLogView) -> Flash:
    return Flash(f"Prompt log off: {log.tenant}", "All that was kept is deleted.")


def canaries_asked() -> Flash:
    return Flash("Canaries asked to run", "Each shows here when it was last proven.")


def _changed(noun: str, name: str, fields: Iterable[str]) -> Flash:
    told = ", ".join(field.replace("_", " ") for field in fields)
    return Flash(f"{noun} changed: {_name(name)}", f"{told.capitalize()}.") if told else Flash("Nothing was changed")


def _state(noun: str, name: str, active: bool) -> Flash:
    if active:
        return Flash(f"{noun} activated: {name}")
    return Flash(f"{noun} deactivated: {name}", f"Gateways refuse all its keys {WITHIN}.")


def _kind(owner: PrincipalView) -> str:
    return "Person" if owner.kind is PrincipalKind.PERSON else "Service account"


def _quota(done: str, quota: QuotaView) -> Flash:
    if quota.hard is None or quota.soft is None:
        return Flash(f"{done}: {_limited(quota)}")
    return Flash(f"{done}: {_limited(quota)}", f"A warning above {_amount(quota.kind, quota.soft)}.")


def _limited(quota: QuotaView) -> str:
    """The hard limit and whose it is; of one that only warns, the soft."""
    if quota.hard is not None:
        return f"{_amount(quota.kind, quota.hard)} for {_whose(quota)}"
    return f"a warning above {_amount(quota.kind, quota.soft or 0)} for {_whose(quota)}"


def _more(limit: QuotaView | QuotaRequestView, amount: int) -> str:
    return f"{_amount(limit.kind, amount)} more for {_whose(limit)}"


def _amount(kind: QuotaKind, amount: int) -> str:
    noun, per = UNITS[kind]
    if noun == "money":
        return f"{presenters.money(amount)} units of money {per}"
    return f"{amount:,} {noun}{'' if amount == 1 else 's'} {per}"


def _whose(limit: QuotaView | QuotaRequestView) -> str:
    part = f"key {limit.key} of " if limit.key else f"project {limit.project} of " if limit.project else ""
    return f"{part}{limit.tenant}{f', model {_name(limit.model)}' if limit.model else ''}"


def _pool(price: PriceView) -> str:
    return _name(price.pool) if price.pool else "every other pool"


def _held(slo: SloView) -> str:
    """To whom they are promised, as far as they are narrowed."""
    pool = f", pool {_name(slo.pool)}" if slo.pool else ""
    return f"{slo.tenant or 'all tenants'}{pool}{f', class {slo.service_class}' if slo.service_class else ''}"


def _name(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _day(at: datetime) -> str:
    return presenters.day(at.timestamp())
