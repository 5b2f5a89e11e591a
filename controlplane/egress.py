"""Where this deployment may connect to when somebody else names the address (F34).

Layer: service. Pure: what a URL says, and whether an address is allowed; it resolves and connects to nothing. Whoever
connects judges the very addresses it is about to use, so a name that is resolved anew cannot lead elsewhere. One
spelling of an address is accepted and every other refused, so that no two readers can disagree about a URL.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

PORTS = {"http": 80, "https": 443}
"""The schemes there are, and the port each means when none is given."""
LONGEST_URL = 500
MOST_NETWORKS = 64

PRIVATE = "10.0.0.0/8,172.16.0.0/12,192.168.0.0/16,fd00::/8"
LOOPBACK = "127.0.0.0/8,::1/128"

_URL = re.compile(
    r"(?P<scheme>https?)://(?:\[(?P<six>[0-9A-Fa-f:.]{2,45})\]|(?P<host>[A-Za-z0-9._-]{1,253}))"
    r"(?::(?P<port>[0-9]{1,5}))?(?P<path>/[!-~]*)?",
    re.IGNORECASE,
)
_LABEL = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")

NEVER: tuple[tuple[str, str], ...] = (
    ("0.0.0.0/8", "unspecified"),
    ("::/128", "unspecified"),
    ("169.254.0.0/16", "link-local"),
    ("fe80::/10", "link-local"),
    ("224.0.0.0/4", "multicast"),
    ("ff00::/8", "multicast"),
    ("240.0.0.0/4", "reserved"),
    ("100.100.100.200/32", "a cloud's metadata"),
    ("168.63.129.16/32", "a cloud's metadata"),
    ("192.0.0.192/32", "a cloud's metadata"),
    ("fd00:ec2::/32", "a cloud's metadata"),
    ("fd20:ce::/32", "a cloud's metadata"),
)
"""Never connected to, whatever an allow-list says."""
_NEVER = tuple((ipaddress.ip_network(network), what) for network, what in NEVER)
_TRANSLATED = tuple(ipaddress.IPv6Network(network) for network in ("64:ff9b::/96", "64:ff9b:1::/48", "::/96"))
"""IPv6 addresses that carry an IPv4 one in their last 32 bits."""


class TargetRefusedError(ValueError):
    """A URL or an address that is not connected to; the message is one clause that says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a URL leads to. `address` is its host when that is an address; else `host` is a name to resolve."""

    scheme: str
    host: str
    port: int
    path: str
    address: Address | None


def parse_target(url: str, *, query: bool = False) -> Target:
    """Read an http(s) URL without user, password and fragment, and without a query unless asked for.

    Raises TargetRefusedError.
    """
    if len(url) > LONGEST_URL:
        raise TargetRefusedError(f"it is longer than {LONGEST_URL} characters")
    found = _URL.fullmatch(url)
    if found is None:
        raise TargetRefusedError("it is not http(s)://host[:port][/path] with a host of plain letters and digits")
    scheme, path = found["scheme"].lower(), found["path"] or ""
    if "#" in path or "\\" in path or ("?" in path and not query):
        raise TargetRefusedError("its path holds '#', '\\' or a query")
    port = int(found["port"]) if found["port"] else PORTS[scheme]
    if not 0 < port < 65536:
        raise TargetRefusedError("its port is not from 1 to 65535")
    address = _six(found["six"]) if found["six"] else _four(found["host"])
    host = (found["six"] or found["host"]).lower()
    if address is None:
        _require_name(host)
    return Target(scheme, host, port, path, address)


def _six(text: str) -> Address:
    try:
        return ipaddress.IPv6Address(text)
    except ValueError:
        raise TargetRefusedError("its host is no IPv6 address") from None


def _four(text: str) -> Address | None:
    try:
        return ipaddress.IPv4Address(text)
    except ValueError:
        return None


def _require_name(host: str) -> None:
    """A name whose last label is a number would be read as an IPv4 address by some and as a name by others."""
    labels = host.split(".")
    if not all(_LABEL.fullmatch(label) for label in labels):
        raise TargetRefusedError("its host is no name: labels of letters, digits and dashes, without a dot at the end")
    if _NUMBER.fullmatch(labels[-1]):
        raise TargetRefusedError("an IPv4 address is written as four decimal numbers without leading zeros")


def parse_networks(text: str) -> tuple[Network, ...]:
    """Networks from a comma-separated list such as "10.0.0.0/8,fd00::/8". Raises ValueError."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if len(names) > MOST_NETWORKS:
        raise ValueError(f"at most {MOST_NETWORKS} networks")
    return tuple(ipaddress.ip_network(name) for name in names)


@dataclass(frozen=True, slots=True)
class EgressPolicy:
    """Which addresses may be connected to: those in `networks`, and with `public` those of the whole Internet."""

    networks: tuple[Network, ...]
    public: bool = False

    def require(self, address: Address) -> None:
        """Raises TargetRefusedError for an address that must not be connected to."""
        for face in _faces(address):
            for network, what in _NEVER:
                if face.version == network.version and face in network:
                    raise TargetRefusedError(f"the address {face} is {what}")
            if not self._allows(face):
                raise TargetRefusedError(f"the address {face} is in no network that is allowed")

    def _allows(self, address: Address) -> bool:
        if any(address.version == network.version and address in network for network in self.networks):
            return True
        return self.public and address.is_global

    def require_all(self, host: str, addresses: Iterable[str]) -> tuple[Address, ...]:
        """The addresses a name was resolved to, if it has any and all are allowed: one bad one spoils the name.

        Raises TargetRefusedError.
        """
        found = tuple(ipaddress.ip_address(address) for address in addresses)
        if not found:
            raise TargetRefusedError(f"the name {host} has no address")
        for address in found:
            self.require(address)
        return found


def _faces(address: Address) -> Iterator[Address]:
    """`address`, and the IPv4 ones that packets to it may end at. A mapped address is its IPv4 one and no other."""
    if isinstance(address, ipaddress.IPv4Address):
        yield address
        return
    if address.ipv4_mapped is not None:
        yield address.ipv4_mapped
        return
    yield address
    if address.sixtofour is not None:
        yield address.sixtofour
    if address.teredo is not None:
        yield from address.teredo
    if int(address) > 1 and any(address in network for network in _TRANSLATED):
        yield ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
