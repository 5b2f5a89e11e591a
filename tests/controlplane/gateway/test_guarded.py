"""F34: a gateway connects to the address it has judged, whatever a name means a moment later, and follows nobody."""

from __future__ import annotations

import msgspec
import pytest

from controlplane.egress import EgressPolicy, TargetRefusedError, parse_networks, parse_target
from controlplane.fleet.addresses import FRESH_S, ReplicaAddresses
from controlplane.gateway.guarded import AddressRefusedError, GuardedAddresses
from controlplane.gateway.upstream import Cause
from controlplane.settings import Settings
from tests.controlplane.gateway import replicas
from tests.controlplane.gateway.harness import CHAT, Running, check_error, route, running_gateway
from tests.controlplane.gateway.replicas import FakeReplica, fake_replica

METADATA = "169.254.169.254"


class Names:
    """A resolver whose answers a test changes: what an attacker's name server does."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    async def __call__(self, host: str) -> list[str]:
        self.asked.append(host)
        if not self.answers:
            raise OSError("no such name")
        return [self.answers.pop(0)] if len(self.answers) > 1 else list(self.answers)


def _ask(served: Running, names: Names) -> None:
    """Let the gateway's connections ask `names`."""
    assert served.gateway._upstream is not None
    served.gateway._upstream._pool._addresses._resolve = names


LOCAL = EgressPolicy(parse_networks("127.0.0.0/8"))


async def test_f34_the_address_that_was_judged_is_the_one_connected_to() -> None:
    names = Names("127.0.0.1", METADATA)
    addresses = GuardedAddresses(LOCAL, resolve=names)
    target = parse_target("http://rebinding.example:80")
    assert await addresses.of(target) == ("127.0.0.1",)
    with pytest.raises(AddressRefusedError, match="link-local"):
        await addresses.of(target)
    assert len(names.asked) == 2, "each connection asks once, and uses what it was told"


async def test_f34_a_name_that_was_good_at_registration_is_judged_anew_when_connecting(
    offline_settings: Settings, replica: FakeReplica
) -> None:
    url = f"http://rebinding.example:{replica.port}"
    names = Names("127.0.0.1")
    await ReplicaAddresses(LOCAL, resolve=names).require(url)
    async with running_gateway(offline_settings, route(url, "r0")) as served:
        _ask(served, names)
        async with served.post(CHAT) as good:
            assert good.status == 200
        names.answers = [METADATA]
        await served.gateway.close()  # the next request needs a new connection
        served.gateway.open()
        _ask(served, names)
        async with served.post(CHAT) as refused:
            assert refused.status == 503
            check_error(await refused.json(), Cause.REFUSED.value)
        assert len(replica.seen) == 1


@pytest.mark.parametrize("host", [METADATA, "0.0.0.0", "[::ffff:169.254.169.254]", "8.8.8.8", "[::]", "2130706433"])
async def test_f34_an_address_that_reached_the_fleet_all_the_same_is_not_connected_to(
    offline_settings: Settings, replica: FakeReplica, host: str
) -> None:
    bad, good = route(f"http://{host}:{replica.port}", "bad"), route(replica, "good")
    async with running_gateway(offline_settings, bad) as served:
        async with served.post(CHAT) as refused:
            assert refused.status == 503
            check_error(await refused.json(), Cause.REFUSED.value)
        assert replica.seen == []
        assert served.metric("upstream_failures_total", cause=Cause.REFUSED.value, retried="yes") == 1
    async with running_gateway(offline_settings, bad, good) as served:
        for _ in range(4):
            async with served.post(CHAT) as answered:
                assert answered.status == 200


async def test_f34_a_network_that_is_not_allowed_is_not_connected_to(
    offline_settings: Settings, replica: FakeReplica
) -> None:
    elsewhere = msgspec.structs.replace(offline_settings, replica_networks="10.0.0.0/8")
    async with running_gateway(elsewhere, route(replica, "r0")) as served, served.post(CHAT) as refused:
        assert refused.status == 503
    assert replica.seen == []


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_f34_a_redirect_is_not_followed(served: Running, replica: FakeReplica, status: int) -> None:
    async with fake_replica() as elsewhere:
        replica.behave = replicas.error(status, {}, {"location": f"{elsewhere.url}/v1/chat/completions"})
        async with served.post(CHAT, allow_redirects=False) as response:
            await response.read()
            assert "location" not in response.headers
        assert elsewhere.seen == []


async def test_f34_names_are_asked_once_while_they_are_fresh_and_the_memory_of_them_is_bounded() -> None:
    now = [0.0]
    names = Names("127.0.0.1")
    addresses = ReplicaAddresses(LOCAL, resolve=names, clock=lambda: now[0])
    for _ in range(3):
        await addresses.require("http://replica.example:80")
    assert names.asked == ["replica.example"]
    now[0] = FRESH_S + 1
    names.answers = ["10.0.0.1"]
    with pytest.raises(TargetRefusedError, match="in no network"):
        await addresses.require("http://replica.example:80")
    names.answers = []
    with pytest.raises(TargetRefusedError, match="cannot be resolved"):
        await addresses.require("http://replica.example:80")
