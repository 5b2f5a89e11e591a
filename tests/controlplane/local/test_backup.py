"""`tidegate backup` and `tidegate restore`: the same rows and secrets again, or one sentence and nothing left."""

from __future__ import annotations

import io
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psycopg
import pytest

from controlplane import migrate
from controlplane.local import backup
from controlplane.local.archive import DUMP, MANIFEST, Manifest, check_archive, write_archive
from controlplane.local.errors import ExitCode, LocalError
from controlplane.local.home import Home
from controlplane.local.postgres import EmbeddedPostgres
from controlplane.settings import Secret
from tests.controlplane.local.test_cli import refused, tidegate
from tests.services import service_folder


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with service_folder("backup") as folder:
        yield folder


@pytest.fixture(scope="module")
def seed(place: Path) -> Path:
    """A stopped home with a migrated database, a tenant and a logged prompt."""
    home = Home(place / "seed")
    home.open()
    for name in ("internal", "session", "metrics"):
        home.secret(name)
    home.admin_file.write_text('{"email": "a", "password": "p", "api_token": "t"}')
    server = EmbeddedPostgres(home.postgres)
    server.start()
    migrate.upgrade(Secret(server.url))
    with psycopg.connect(server.url) as connection:
        connection.execute("INSERT INTO tenants (slug, name, cache_salt) VALUES ('acme', 'Acme', 'salt')")
        connection.execute(
            "INSERT INTO logged_requests (tenant_id, at, request_id, project, key_id, model, outcome, reason, status, "
            "prompt, answer, cut, redactions) SELECT id, now(), 'r', 'p', 'k', 'm', 'finished', '', 200, "
            "'canary-prompt', '', false, 0 FROM tenants"
        )
    server.stop()
    home.close()
    return home.path


@pytest.fixture(scope="module")
def saved(seed: Path, place: Path) -> Path:
    backup.back_up(seed, place / "saved.tar")
    return place / "saved.tar"


def rows(home: Path, table: str = "tenants") -> int:
    server = EmbeddedPostgres(home / "pg")
    server.start()
    try:
        with psycopg.connect(server.url) as connection:
            found = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
            assert found is not None
            return int(found[0])
    finally:
        server.stop()


def test_a_stopped_home_comes_back_with_its_rows_and_secrets(seed: Path, saved: Path, place: Path) -> None:
    made = check_archive(saved)
    assert (made.revision, made.secrets) == (migrate.head(), True)
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    home = place / "again"
    backup.restore(saved, home)
    assert rows(home) == 1
    assert rows(home, "logged_requests") == 0, "what a tenant may have deleted is not backed up"
    for name in ("internal.secret", "session.secret", "metrics.secret", "admin.json"):
        assert (home / name).read_bytes() == (seed / name).read_bytes()
        assert stat.S_IMODE((home / name).stat().st_mode) == 0o600
    assert not list(home.glob(".tidegate-backup*"))
    assert not list(place.glob(".*"))


def test_a_running_database_is_backed_up_as_it_is(seed: Path, place: Path) -> None:
    server = EmbeddedPostgres(seed / "pg")
    server.start()
    try:
        done = tidegate("backup", place / "running.tar", "--home", seed)
        assert done.returncode == 0, done.stderr
        assert "checked by its checksums" in done.stdout
    finally:
        server.stop()
    assert check_archive(place / "running.tar").revision == migrate.head()


def test_secrets_can_be_left_out(seed: Path, place: Path) -> None:
    made = backup.back_up(seed, place / "without.tar", secrets=False)
    assert set(made.parts) == {DUMP}
    content = (place / "without.tar").read_bytes()
    for name in ("internal.secret", "session.secret", "metrics.secret"):
        assert (seed / name).read_bytes().strip() not in content
    assert b"canary-prompt" not in content
    done = tidegate("restore", place / "without.tar", "--home", place / "bare")
    assert "makes new ones" in done.stdout
    assert not list((place / "bare").glob("*.secret"))


def test_nothing_is_written_over(seed: Path, saved: Path, place: Path) -> None:
    before = saved.read_bytes()
    assert "exists already" in refused(tidegate("backup", saved, "--home", seed), ExitCode.USAGE)
    assert saved.read_bytes() == before
    assert "is not empty" in refused(tidegate("restore", saved, "--home", seed), ExitCode.USAGE)
    assert rows(seed) == 1
    (place / "busy" / "run").mkdir(parents=True)
    (place / "busy" / "run" / "endpoints.json").write_text("{}")
    running = refused(tidegate("restore", saved, "--home", place / "busy"), ExitCode.ALREADY_RUNNING)
    assert "a `tidegate up` runs in" in running


def test_no_file_that_somebody_else_left_beside_it_is_written_to(saved: Path, place: Path) -> None:
    folder = place / "shared"
    folder.mkdir()
    victim = folder / "victim"
    victim.write_text("untouched")
    (folder / ".mine.tar.new").symlink_to(victim)
    with pytest.raises(LocalError):
        write_archive(folder / "mine.tar", check_archive(saved), {})
    assert victim.read_text() == "untouched"
    assert sorted(one.name for one in folder.iterdir()) == [".mine.tar.new", "victim"]


def test_where_there_is_nothing_to_back_up_it_says_so(place: Path) -> None:
    nothing = refused(tidegate("backup", place / "x.tar", "--home", place / "nowhere"), ExitCode.USAGE)
    assert "holds no PostgreSQL data" in nothing
    assert not (place / "x.tar").exists()
    assert not (place / "nowhere").exists()
    missing = refused(tidegate("backup", place / "no" / "x.tar", "--home", place / "nowhere"), ExitCode.USAGE)
    assert "is no folder" in missing


def remade(saved: Path, target: Path, *, rename: str = "", drop: bool = False, **changes: object) -> Path:
    """A copy of a backup with a changed manifest, a renamed dump, or without it."""
    manifest = msgspec.structs.replace(check_archive(saved), **changes)
    with tarfile.open(saved) as old, tarfile.open(target, "w") as new:
        for entry in old:
            content = old.extractfile(entry)
            assert content is not None
            raw = msgspec.json.encode(manifest) if entry.name == MANIFEST else content.read()
            if entry.name == DUMP:
                if drop:
                    continue
                entry.name = rename or entry.name
            entry.size = len(raw)
            new.addfile(entry, io.BytesIO(raw))
    return target


@pytest.mark.parametrize("at", [0.0, 0.02, 0.3, 0.6, 0.9])
def test_a_flipped_byte_is_found_before_anything_is_restored(saved: Path, place: Path, at: float) -> None:
    content = bytearray(saved.read_bytes())
    with tarfile.open(saved) as tar:
        dump = tar.getmember(DUMP)
    position = int(dump.offset_data + at * (dump.size - 1))
    content[position] ^= 0xFF
    broken = place / f"broken-{at}.tar"
    broken.write_bytes(content)
    home = place / f"home-{at}"
    with pytest.raises(LocalError, match="is damaged") as found:
        backup.restore(broken, home)
    assert found.value.code is ExitCode.DAMAGED
    assert not home.exists()


def test_a_backup_that_is_not_there_is_a_wrong_argument(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="No such file") as found:
        check_archive(tmp_path / "none.tar")
    assert found.value.code is ExitCode.USAGE


def test_what_is_no_whole_backup_is_refused(saved: Path, place: Path) -> None:
    short = place / "short.tar"
    short.write_bytes(saved.read_bytes()[: saved.stat().st_size // 2])
    text = place / "text.tar"
    text.write_text("not a tar at all\n" * 100)
    empty = place / "empty.tar"
    empty.write_bytes(b"")
    odd = [remade(saved, place / f"of-{version}.tar", postgres=version) for version in ("", "seventeen", "-1")]
    for path in (short, text, empty, *odd, remade(saved, place / "climbing.tar", rename="../../evil"),
                 remade(saved, place / "dropped.tar", drop=True)):  # fmt: skip
        with pytest.raises(LocalError) as found:
            backup.restore(path, place / "never")
        assert found.value.code is ExitCode.DAMAGED
    assert not (place / "never").exists()


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"format": 2}, ExitCode.USAGE, "a newer Tidegate"),
        ({"postgres": "99.1"}, ExitCode.DATA_VERSION, "PostgreSQL 99.1"),
        ({"revision": "9999"}, ExitCode.USAGE, "is not known"),
    ],
)
def test_what_a_newer_version_made_is_refused(
    saved: Path, place: Path, changes: dict[str, object], code: ExitCode, said: str
) -> None:
    newer = remade(saved, place / f"newer-{next(iter(changes))}.tar", **changes)
    with pytest.raises(LocalError, match=said) as found:
        backup.restore(newer, place / "never")
    assert found.value.code is code
    assert not (place / "never").exists()


def test_a_restore_that_fails_half_way_leaves_nothing(
    saved: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise LocalError("cannot restore the database: the disk is full", ExitCode.DISK_FULL)

    monkeypatch.setattr(backup, "_run", fails)
    with pytest.raises(LocalError):
        backup.restore(saved, place / "half")
    assert not (place / "half").exists()
    (place / "given").mkdir()
    with pytest.raises(LocalError):
        backup.restore(saved, place / "given")
    assert list((place / "given").iterdir()) == []


def test_the_manifest_says_what_is_inside(saved: Path) -> None:
    with tarfile.open(saved) as tar:
        assert tar.getnames()[0] == MANIFEST
        content = tar.extractfile(MANIFEST)
        assert content is not None
        manifest = msgspec.json.decode(content.read(), type=Manifest)
        assert set(manifest.parts) == set(tar.getnames()) - {MANIFEST}
