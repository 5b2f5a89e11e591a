"""A running product is backed up, and the copy starts with the same keys and ledger."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlencode

from controlplane.tenants.schemas import PROBE_TENANT
from tests.controlplane.local.processes import wait_until
from tests.system.product import Product


def tidegate(*arguments: str | Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "controlplane", *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def totals(product: Product) -> list[dict[str, object]]:
    now = datetime.now(UTC)
    span = {"since": (now - timedelta(days=1)).isoformat(), "until": (now + timedelta(hours=1)).isoformat()}
    found: list[dict[str, object]] = product.admin("GET", f"/usage/totals?{urlencode({**span, 'by': 'tenant'})}")
    return [row for row in found if row["key"] != PROBE_TENANT]  # canaries go on


def test_a_backup_of_a_running_product_starts_elsewhere_with_the_same_keys_and_ledger(
    product: Product, home: Path
) -> None:
    key, _ = product.tenant_with_key("backed-up")
    body = {"model": product.model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert product.as_tenant("POST", "/v1/chat/completions", body, key=key).status == 200
    assert wait_until(lambda: any(row["key"] == "backed-up" for row in totals(product)), 30)
    before = totals(product)
    saved = home.parent / "saved.tar"
    tidegate("backup", saved, "--home", product.home)
    tidegate("restore", saved, "--home", home)
    copy = Product(home)
    copy.start("--no-replica")
    try:
        assert copy.credentials == product.credentials
        assert copy.as_tenant("GET", "/v1/models", key=key).status == 200
        assert copy.as_tenant("GET", "/v1/models", key=product.demo_key).status == 200
        assert copy.as_tenant("GET", "/v1/models", key=key[:-1]).status == 401
        assert totals(copy) == before
    finally:
        copy.stop()
