"""Addresses and ports of this machine: a free port, its address for other machines, whether a name is this machine."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Mapping

__all__ = ["free_port", "is_local", "own_address", "port_is_free", "resolve"]


def free_port(address: str = "") -> int:
    """A port that no program listens on now."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


def port_is_free(port: int, address: str = "") -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except PermissionError:
            return False
        except OSError as error:
            import errno

            return error.errno != errno.EADDRINUSE
        return True


def resolve(name: str) -> tuple[str, ...]:
    """The addresses of a name; empty if it has none."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_local(name: str) -> bool:
    """Whether a name or address is this machine: a socket can be bound to it."""
    if name in ("localhost", socket.gethostname()):
        return True
    for address in resolve(name):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family) as probe:
            probe.bind((address, 0))
            return True
    return False


def own_address(environment: Mapping[str, str] = os.environ) -> str:
    """The address by which other machines reach this one: that of the default route, else of the first interface.

    An interface chosen by GLOO_SOCKET_IFNAME, I_MPI_HYDRA_IFACE, HYDRA_IFACE or FI_TCP_IFACE is preferred.
    """
    for key in ("GLOO_SOCKET_IFNAME", "I_MPI_HYDRA_IFACE", "HYDRA_IFACE", "FI_TCP_IFACE"):
        name = environment.get(key, "").split(",")[0]
        if name and (address := interface_address(name)):
            return address
    # No packet is sent: connecting a datagram socket only looks up the route.
    for family, far in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))
            return str(probe.getsockname()[0])
    for _, name in socket.if_nameindex():
        if name != "lo" and (address := interface_address(name)):
            return address
    return "127.0.0.1"


def interface_address(name: str) -> str | None:
    """The IPv4 address of an interface (SIOCGIFADDR); None if it has none."""
    if not sys.platform.startswith("linux"):
        return None
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", name.encode()[:15])
        with contextlib.suppress(OSError):
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24])
    return None
