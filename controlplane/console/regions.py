"""The live regions of the Overview: named pieces of the page, rendered once for everybody who watches.

Layer: service. Pure given its inputs: an `Overview` (or the reason there is none) goes in, HTML by event name comes
out. The page and the event stream place the very same text.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from markupsafe import Markup

from controlplane.console import presenters, views
from controlplane.console.templates import Templates
from controlplane.telemetry.schemas import Overview, Series

Regions = Mapping[str, Markup]

NAMES = ("status", "stats", "ttft", "tpot", "outcomes", "replicas", "tenants", "footnote")
AWAY = {
    "database": "PostgreSQL does not answer",
    "redis": "Redis does not answer",
    None: "The figures could not be computed",
}


def overview_regions(
    templates: Templates, overview: Overview, *, stale_after_s: float, redis_away_since: float | None = None
) -> dict[str, Markup]:
    """Every region from a computed Overview. Without Redis the figures hold, only the load is older."""
    page = views.overview_page(overview)
    return {
        "status": _status(templates, overview, stale_after_s, redis_away_since),
        "stats": templates.render("overview/_stats.html", page=page),
        "ttft": templates.render("overview/_quantiles.html", rows=page.ttft),
        "tpot": templates.render("overview/_quantiles.html", rows=page.tpot),
        "outcomes": templates.render("overview/_outcomes.html", page=page),
        "replicas": templates.render("overview/_replicas.html", page=page),
        "tenants": templates.render("overview/_tenants.html", page=page),
        "footnote": templates.render("overview/_footnote.html", page=page),
    }


def _status(templates: Templates, overview: Overview, stale_after_s: float, redis_away_since: float | None) -> Markup:
    context = {"message": "", "since": None, "as_of": overview.as_of, "report_age": ""}
    if overview.last_report_at is None:
        return templates.render("overview/_status.html", state="waiting", **context)
    silence = overview.as_of - overview.last_report_at
    if silence > stale_after_s:
        context |= {"message": "No report comes in", "since": overview.last_report_at}
        return templates.render("overview/_status.html", state="stale", **context)
    if redis_away_since is not None:
        context |= {"message": AWAY["redis"] + "; load is the newest window's mean", "since": redis_away_since}
        return templates.render("overview/_status.html", state="degraded", **context)
    context["report_age"] = presenters.age(silence)
    return templates.render("overview/_status.html", state="live", **context)


def failed_status(templates: Templates, store: str | None, since: float) -> Markup:
    """The status while figures cannot be computed: whose fault, and since when."""
    return templates.render(
        "overview/_status.html", state="error", message=AWAY[store], since=since, as_of=None, report_age=""
    )


def unavailable_regions(templates: Templates) -> dict[str, Markup]:
    """Placeholders for a page opened before any figure could be computed."""
    blank = dict.fromkeys(NAMES, Markup())
    return {**blank, "stats": templates.render("overview/_loading.html")}


class SeriesEvent(msgspec.Struct, frozen=True):
    """Chart points that changed: rows of [at, *columns]; points before `from` have left the window."""

    columns: list[str]
    rows: list[list[float | None]]
    start: int = msgspec.field(name="from")


COLUMNS = [field for field in Series.__struct_fields__ if field != "at"]


def series_event(series: Series, previous: Series | None = None) -> SeriesEvent | None:
    """All points, or those that differ from `previous`; None when nothing does."""
    rows = _rows(series)
    if previous is not None:
        known = _rows(previous)
        rows = {at: row for at, row in rows.items() if known.get(at) != row}
        if not rows:
            return None
    start = series.at[0] if series.at else 0
    return SeriesEvent(columns=COLUMNS, rows=[[at, *row] for at, row in sorted(rows.items())], start=start)


def _rows(series: Series) -> dict[int, tuple[float | None, ...]]:
    columns = [getattr(series, column) for column in COLUMNS]
    return dict(zip(series.at, zip(*columns, strict=True), strict=True))
