"""The network interfaces of this host, and which of them the others reach.

Names of hosts are not asked: a hostname may stand for 127.0.1.1, for nothing, or for a card that no other host sees.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

from axo import settings

_SIOCGIFADDR = 0x8915


def names() -> list[str]:
    """The interfaces that there are."""
    return [name for _, name in socket.if_nameindex()]


def own_address(meeting: str) -> str:
    """The address at which other hosts reach this one.

    That of the interface that ``AXO_INTERFACE`` names, or the first of ``GLOO_SOCKET_IFNAME``; else the one on the way
    to the host ``meeting``. "" where that is this host, or not known.

    Raises:
        ValueError: The interface does not exist, or has no address.
    """
    named = {
        "AXO_INTERFACE": settings.value_of("AXO_INTERFACE"),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0],
    }
    for variable, name in named.items():
        if name:
            return _address_of(variable, name)
    return address_towards(meeting)


def _address_of(variable: str, name: str) -> str:
    """The address of an interface: of IPv4, else of IPv6."""
    if name not in names():
        raise ValueError(f"{variable}={name!r} is no interface of this host; use one of {', '.join(names())}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
            return socket.inet_ntoa(reply[20:24])
        except OSError:  # no address of IPv4
            pass
    listed = Path("/proc/net/if_inet6")  # a kernel may have no IPv6
    for line in listed.read_text().splitlines() if listed.exists() else ():
        digits, *_, owner = line.split()
        own = ipaddress.IPv6Address(int(digits, 16))
        if owner == name and not own.is_link_local:
            return str(own)
    raise ValueError(f"{variable}={name!r} has no address that other hosts reach; use one of {', '.join(names())}")


def address_towards(host: str) -> str:
    """This host's own address on the way to another; "" where there is no way, or ``host`` is this host by loopback."""
    try:
        ways = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM) if host else []
    except OSError:
        return ""
    for family, kind, protocol, _, place in ways:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(place)  # sends nothing
                own = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
        except OSError:
            continue
        if not own.is_loopback and not own.is_link_local:
            return str(own)
    return ""
