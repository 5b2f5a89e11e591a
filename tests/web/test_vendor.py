"""Vendored files are the ones we name, byte for byte, and nothing of the console comes from elsewhere."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from controlplane.console.templates import STATIC, WEB, Templates

VENDOR = STATIC / "vendor"
ROW = re.compile(r"^\| `([^`]+)` \| `([0-9a-f]{64})` \|$", re.MULTILINE)


def own_files(*suffixes: str) -> list[Path]:
    return [path for path in WEB.rglob("*") if path.suffix in suffixes and VENDOR not in path.parents]


def test_every_vendored_file_has_its_hash_in_the_readme() -> None:
    stated = dict(ROW.findall((VENDOR / "README.md").read_text()))
    present = {
        str(path.relative_to(VENDOR)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in VENDOR.rglob("*")
        if path.is_file() and path.name != "README.md"
    }
    assert present == stated


def test_every_vendored_package_brings_its_licence() -> None:
    for package in (path for path in VENDOR.iterdir() if path.is_dir()):
        assert list(package.glob("LICENSE*")), package


def test_nothing_is_loaded_from_another_host() -> None:
    for path in own_files(".html", ".css", ".js", ".svg"):
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://(?!\{)|@import|url\(", text), path


def test_templates_hold_no_inline_script_style_or_handler() -> None:
    for path in own_files(".html"):
        text = path.read_text()
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:|hx-on|hx-vals=.js:", text), path
        assert all(" src=" in tag for tag in re.findall(r"<script[^>]*>", text)), path


def test_own_scripts_need_no_eval_and_no_markup_from_strings() -> None:
    for path in own_files(".js"):
        assert not re.search(
            r"\beval\(|new Function|innerHTML|outerHTML|insertAdjacentHTML|document\.write", path.read_text()
        ), path


def test_every_template_compiles() -> None:
    templates = Templates()
    for path in own_files(".html"):
        templates._environment.get_template(str(path.relative_to(WEB / "templates")))


def test_an_asset_address_changes_with_its_content(tmp_path: Path) -> None:
    (tmp_path / "static").mkdir()
    (tmp_path / "templates").mkdir()
    asset = tmp_path / "static" / "a.css"
    addresses = set()
    for content in ("a{}", "b{}"):
        asset.write_text(content)
        addresses.add(Templates(tmp_path).static("a.css"))
    assert len(addresses) == 2
