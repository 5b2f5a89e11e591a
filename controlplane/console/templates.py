"""Rendering: one Jinja environment over `web/templates`, and addresses of static files.

Layer: service. It only turns values into text; it never queries. Autoescape is on and an unknown name raises.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from controlplane.console import presenters

WEB = Path(__file__).resolve().parents[2] / "web"
STATIC = WEB / "static"


class Templates:
    """Renders pages and fragments; an asset's address carries the hash of its content."""

    def __init__(self, root: Path = WEB) -> None:
        self._static = root / "static"
        self._versions: dict[str, str] = {}
        self._environment = Environment(
            loader=FileSystemLoader(root / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.globals |= {"static": self.static, "p": presenters}

    def static(self, path: str) -> str:
        """`/static/<path>?v=<hash>`; raises FileNotFoundError for a file that is not there."""
        version = self._versions.get(path)
        if version is None:
            version = hashlib.sha256((self._static / path).read_bytes()).hexdigest()[:12]
            self._versions[path] = version
        return f"/static/{path}?v={version}"

    def render(self, template: str, **context: Any) -> Markup:
        """The text of `template`, safe to place inside another one."""
        return Markup(self._environment.get_template(template).render(**context))  # noqa: S704 - autoescape is on
