"""Which cores the gateway and the load have."""

from __future__ import annotations

import pytest

from controlplane.lab.bench.cores import Cores, choose_cores
from controlplane.local.errors import LocalError


def test_the_gateway_and_the_load_have_cores_of_their_own() -> None:
    assert choose_cores({0, 1}) == Cores(gateway=1, load=0, rest=frozenset({0}))
    assert choose_cores({2, 4, 6, 8}) == Cores(gateway=8, load=6, rest=frozenset({2, 4}))
    with pytest.raises(LocalError, match="two CPU cores"):
        choose_cores({3})
