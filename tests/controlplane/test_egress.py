"""F34: every spelling of an address that must not be connected to is refused, and no two readers disagree."""

from __future__ import annotations

import ipaddress
import socket

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from controlplane.egress import (
    LOOPBACK,
    NEVER,
    PRIVATE,
    EgressPolicy,
    TargetRefusedError,
    parse_networks,
    parse_target,
)

EVERYTHING = EgressPolicy(parse_networks("0.0.0.0/0,::/0"), public=True)
SITE = EgressPolicy(parse_networks(f"{PRIVATE},{LOOPBACK}"))
INTERNET = EgressPolicy((), public=True)

FORBIDDEN = [ipaddress.ip_network(network) for network, _ in NEVER]


def inside(network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> st.SearchStrategy[object]:
    kind = ipaddress.IPv4Address if network.version == 4 else ipaddress.IPv6Address
    return st.integers(int(network[0]), int(network[-1])).map(kind)


bad_addresses = st.sampled_from(FORBIDDEN).flatmap(inside)
private = st.sampled_from([ipaddress.ip_network(n) for n in f"{PRIVATE},{LOOPBACK}".split(",")]).flatmap(inside)
v4 = st.integers(0, 2**32 - 1).map(ipaddress.IPv4Address)


def spellings(address: ipaddress.IPv4Address) -> list[str]:
    """Ways in which some reader takes a text for this IPv4 address."""
    number = int(address)
    a, b, c, d = address.packed
    return [
        str(address),
        str(number),
        hex(number),
        f"0{number:o}",
        f"{a}.{number & 0xFFFFFF}",
        f"{a}.{b}.{number & 0xFFFF}",
        f"{a:#x}.{b:#x}.{c:#x}.{d:#x}",
        f"0{a:o}.0{b:o}.0{c:o}.0{d:o}",
        f"{a:03d}.{b:03d}.{c:03d}.{d:03d}",
        f"{address}.",
        f"[::ffff:{address}]",
        f"[::ffff:{a:x}{b:02x}:{c:x}{d:02x}]",
        f"[::{address}]",
        f"[64:ff9b::{address}]",
        f"[2002:{a:x}{b:02x}:{c:x}{d:02x}::1]",
        f"[{ipaddress.IPv6Address((0x20010000 << 96) | (0xFFFFFFFF ^ number))}]",
        "".join(chr(0xFF10 + int(x)) if x.isdigit() else "。" for x in str(address)),
        f"user@{address}",
        f"good.example@{address}",
        f"{address}%00.good.example",
        f"{address}#@good.example",
        f"{address}\\@good.example",
        f"{address} ",
        f"{address}\t",
    ]


def refused(policy: EgressPolicy, url: str) -> bool:
    """Whether a URL is refused outright, or its literal address is."""
    try:
        target = parse_target(url)
        if target.address is not None:
            policy.require(target.address)
    except TargetRefusedError:
        return True
    return False


@given(st.sampled_from([n for n in FORBIDDEN if n.version == 4]).flatmap(inside))
@example(ipaddress.IPv4Address("169.254.169.254"))
@example(ipaddress.IPv4Address("0.0.0.0"))
def test_f34_no_spelling_of_a_forbidden_address_passes_even_when_everything_is_allowed(
    address: ipaddress.IPv4Address,
) -> None:
    for host in spellings(address):
        if host == "[::0.0.0.1]":
            continue  # the IPv6 loopback address, and meant as such
        assert refused(EVERYTHING, f"http://{host}/latest/meta-data"), host
        assert refused(EVERYTHING, f"http://{host}:80"), host


@given(bad_addresses)
@example(ipaddress.IPv6Address("fd00:ec2::254"))
@example(ipaddress.IPv6Address("fe80::1%eth0"))
def test_f34_no_allow_list_opens_a_forbidden_address(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    with pytest.raises(TargetRefusedError):
        EVERYTHING.require(address)
    with pytest.raises(TargetRefusedError):
        EVERYTHING.require_all("a.name", ["8.8.8.8", str(address)])


@given(private)
def test_f34_private_addresses_are_replicas_own_and_nobody_elses(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    never = any(address.version == network.version and address in network for network in FORBIDDEN)
    host = f"[{address}]" if address.version == 6 else str(address)
    assert refused(SITE, f"http://{host}:8000") is never
    assert refused(INTERNET, f"https://{host}/hook")
    if address.version == 4:
        assert all(refused(INTERNET, f"https://{one}/hook") for one in spellings(address))


@given(v4.filter(lambda address: address.is_global and not address.is_multicast))
def test_f34_the_internet_is_for_webhooks_and_not_for_replicas(address: ipaddress.IPv4Address) -> None:
    forbidden = any(network.version == 4 and address in network for network in FORBIDDEN)
    assert refused(INTERNET, f"https://{address}/hook") is forbidden
    assert refused(SITE, f"http://{address}:8000")


hosts = st.text(st.sampled_from("0123456789abcdefxX.-_:"), min_size=1, max_size=20)


@given(hosts)
@example("127.1")
@example("0x7f.1")
@example("0177.0.0.1")
@example("2130706433")
@example("1.2.3.4.")
@example("0x")
def test_f34_what_is_taken_for_a_name_no_resolver_reads_as_an_address(host: str) -> None:
    """Else a literal would slip by the rules for addresses, whatever the system's resolver thinks of it."""
    try:
        target = parse_target(f"http://{host}/")
    except TargetRefusedError:
        return
    try:
        found = socket.getaddrinfo(target.host, None, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = []
    numeric = {ipaddress.ip_address(str(entry[4][0])) for entry in found}
    assert numeric == ({target.address} if target.address else set())


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://",
        "//host",
        "host:8000",
        "ftp://host",
        "gopher://host",
        "file:///etc/passwd",
        "unix:/run/docker.sock",
        "http:/host",
        "http:\\\\host",
        "http://host:0",
        "http://host:65536",
        "http://host:-1",
        "http://host:٣",
        "http://user@host",
        "http://user:password@host",
        "http://@host",
        "http://host/#fragment",
        "http://host/?query",
        "http://host/a\\b",
        "http://host/a b",
        "http://host\r\nx: y",
        "http://host\x00",
        " http://host",
        "http://host.",
        "http://.host",
        "http://a..b",
        "http://-a",
        "http://a-",
        "http://a.123",
        "http://a.0x1f",
        "http://bücher.example",
        "http://ⓛocalhost",
        "http://127。0。0。1",
        "http://%31%32%37.0.0.1",
        "http://[::1",
        "http://[fe80::1%25eth0]",
        "http://[::ffff:127.0.0.1]@host",
        "http://" + "a" * 64 + ".example",
        "http://host/" + "a" * 500,
    ],
)
def test_f34_what_is_no_plain_url_is_refused(url: str) -> None:
    with pytest.raises(TargetRefusedError):
        parse_target(url)


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("http://127.0.0.1:7310", "127.0.0.1", 7310),
        ("HTTP://Replica-1.Pods.Example", "replica-1.pods.example", 80),
        ("https://replica_1/prefix/of~it", "replica_1", 443),
        ("http://[FD00::1]:8000/", "fd00::1", 8000),
        ("http://xn--bcher-kva.example", "xn--bcher-kva.example", 80),
        ("http://1.a", "1.a", 80),
    ],
)
def test_plain_urls_are_read(url: str, host: str, port: int) -> None:
    target = parse_target(url)
    assert (target.host, target.port) == (host, port)


def test_a_query_passes_where_it_is_wanted() -> None:
    assert parse_target("https://hooks.example/x?token=1", query=True).path == "/x?token=1"


@pytest.mark.parametrize("text", ["10.0.0.1/8", "10.0.0.0/33", "nonsense", ",".join(["10.0.0.0/8"] * 65)])
def test_networks_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        parse_networks(text)


def test_a_name_without_addresses_is_refused() -> None:
    with pytest.raises(TargetRefusedError, match="no address"):
        SITE.require_all("nowhere.example", [])
