"""docs/failures.md says which tests prove what, and is right."""

from __future__ import annotations

import re

import pytest

from tests.failures import OWED, PAGE, Function, functions, labels_of, page, proofs

ENFORCED = (*range(1, 18), 23, 24, 32, 33, 34, 36, 38, 39)
"""What tenants are promised: quotas, outages, admission, privacy and jobs."""


@pytest.fixture(scope="module")
def every() -> list[Function]:
    return list(functions())


@pytest.mark.parametrize("label", ENFORCED, ids=lambda label: f"F{label}")
def test_what_tenants_are_promised_is_proven_by_a_test_that_says_so(every: list[Function], label: int) -> None:
    inside = [each for each in proofs(every)[label] if each.file.startswith("controlplane/")]
    assert any(not each.slow for each in inside)


def test_a_label_stands_where_it_is_looked_for_and_is_known(every: list[Function]) -> None:
    for path, node in every:
        labels = labels_of(node.name)
        assert set(labels) <= set(OWED), (path, node.name)
        stray = re.findall(r"(?:^|_)f[0-9]+(?=_|$)", node.name.split("_", len(labels) + 1)[-1])
        assert not stray, (path, node.name)


def test_the_page_is_what_the_tests_say(every: list[Function]) -> None:
    assert PAGE.read_text("utf-8") == page(proofs(every)), "tests changed: run `python -m tests.failures`"


def test_labels_are_read_from_names() -> None:
    assert labels_of("test_f1_f13_one_limit") == [1, 13]
    assert labels_of("test_f12_a_client_that_leaves") == [12]
    assert labels_of("test_first_f3_things") == []
