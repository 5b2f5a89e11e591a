"""`tidegate policy` and the operator's decision on a request, against a real control-plane process."""

from __future__ import annotations

from tests.controlplane.quotas.test_cli import data, good, key, run

__all__ = ["key"]  # a fixture


def test_an_operator_lists_changes_takes_one_back_and_decides_with_an_amount(key: str) -> None:
    assert "no gateway and no replica has reported yet" in run("policy", "show").stderr
    quota = data("quota", "create", "acme", "tokens_per_day", "--hard", "1000")
    data("quota", "change", quota["id"], "--hard", "5")
    change = data("policy", "changes", "--kind", "quotas", "--tenant", "acme", "--limit", "1")[0]
    assert (change["who"], change["before"]["hard"], change["after"]["hard"]) == ("operator", 1000, 5)
    assert "hard: 1000 → 5" in " ".join(good("policy", "changes", "--kind", "quotas").split())
    assert data("policy", "rollback", str(change["id"]))["restores"] == change["id"]
    assert data("quota", "show", quota["id"])["hard"] == 1000
    refused = run("policy", "rollback", str(change["id"]))
    assert (refused.exit_code, "it has changed since" in refused.stderr) == (1, True)
    assert run("policy", "rollback", "999999").exit_code == 1
    assert run("policy", "rollback", "first").exit_code == 2
    assert data("policy", "show")["epoch"] > change["epoch"]
    assert run("quota", "approve", quota["id"], "--until", "2030-01-01", "--for-good").exit_code == 2
