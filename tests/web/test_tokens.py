"""The palette keeps its contrast in both themes: text 4.5 to 1, lines and bars 3 to 1 (WCAG 2.2, 1.4.3 and 1.4.11)."""

from __future__ import annotations

import re

import pytest

from controlplane.console.templates import STATIC

CSS = (STATIC / "css" / "tokens.css").read_text()
GROUNDS = ("background", "card", "muted", "rail")
TEXTS = ("foreground", "muted-foreground", "ok", "warn", "bad", "info")
LINES = ("series-1", "series-2", "series-3", "series-4", "series-5", "meter", "input", "ring")


def palette(theme: str) -> dict[str, str]:
    """Name → #rrggbb of a theme; dark overrides light."""
    blocks = dict(re.findall(r"^([:.]\w+) \{(.*?)^\}", CSS, re.MULTILINE | re.DOTALL))
    found = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", blocks[":root"]))
    return found | (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", blocks[".dark"])) if theme == "dark" else {})


def luminance(colour: str) -> float:
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_the_formula_itself() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_lines_stand_out(theme: str) -> None:
    colours = palette(theme)
    for text in TEXTS:
        for ground in GROUNDS:
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for line in LINES:
        assert contrast(colours[line], colours["card"]) >= 3.0, line
    assert contrast(colours["primary"], colours["primary-foreground"]) >= 4.5
