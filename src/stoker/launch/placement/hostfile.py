"""The hostfile: reads the formats of all MPIs, checks it, and divides processes over its hosts."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stoker.errors import UserError
from stoker.machine import network
from stoker.numbers import whole_number
from stoker.user_files import MIB, read_text

__all__ = ["Host", "check", "parse", "read", "spread"]

# Names that a program could take for an option, or a shell could interpret, are refused.
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,252})")
_SIZE = 4 * MIB
"""Bytes; enough for 100,000 hosts."""
_MOST_SLOTS = 65536
_SLOTS = re.compile(r"(?:slots|max[-_]slots|cpu|n)\s*=\s*(\d+)", re.I)


@dataclass(frozen=True)
class Host:
    name: str
    """A name or an address, without brackets."""
    slots: int | None = None
    """The number of processes it takes, if the file says so."""
    line: int = 0


def read(path: str) -> tuple[Host, ...]:
    hosts = parse(read_text(path, "hostfile", limit=_SIZE), path)
    if not hosts:
        raise UserError(f"hostfile {path} names no host; write one name or address per line, optionally with slots=N")
    return hosts


def parse(text: str, where: str = "hostfile") -> tuple[Host, ...]:
    """`host`, `host:4` (Intel MPI, MPICH), `host slots=4` (Open MPI), IPv6 bare or in brackets, # comments."""
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.split("#", 1)[0].strip()
        if content:
            hosts.append(_host(content, number, where))
    return tuple(hosts)


def _host(content: str, number: int, where: str) -> Host:
    word, *others = content.split(maxsplit=1)
    rest = others[0] if others else ""
    name, slots = word, None
    if bracketed := re.fullmatch(r"\[([^\]]+)\](?::(\d+))?", word):
        name, slots = bracketed[1], bracketed[2]
    elif not _is_address(word) and (counted := re.fullmatch(r"(.+?):(\d+)", word)):
        name, slots = counted[1], counted[2]
    if match := _SLOTS.search(rest):
        slots = match[1]
    if not _is_address(name) and not _NAME.fullmatch(name):
        raise UserError(f"{where}, line {number}: {name!r} is not a host name or address")
    count = whole_number(slots) if slots is not None else None
    if slots is not None and (count is None or not 1 <= count <= _MOST_SLOTS):
        raise UserError(
            f"{where}, line {number}: {name} has {slots} slots; it must be at least 1, at most {_MOST_SLOTS:,}"
        )
    return Host(name, count, number)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text.split("%")[0])
    except ValueError:
        return False
    # What follows the % names an interface, and is passed to ssh and mpirun with the address.
    return "%" not in text or _NAME.fullmatch(text.split("%", 1)[1]) is not None


def check(
    hosts: Sequence[Host],
    where: str,
    *,
    per_host: int | None = None,
    resolve: Callable[[str], tuple[str, ...]] = network.resolve,
    is_local: Callable[[str], bool] = network.is_local,
) -> list[str]:
    """Raises UserError for what cannot work; returns warnings for what is only unusual."""
    seen: dict[str, Host] = {}
    for host in hosts:
        if host.name in seen:
            raise UserError(
                f"{where}, line {host.line}: {host.name} is already in line {seen[host.name].line}; "
                f"name each host once, with slots={{number}} for several processes"
            )
        seen[host.name] = host
        if per_host is not None and host.slots is not None and host.slots < per_host:
            raise UserError(
                f"{where}, line {host.line}: {host.name} has {host.slots} slots, but {per_host} processes per machine were "
                f"requested; raise slots or lower -ppn"
            )
    owners: dict[str, Host] = {}
    for host in hosts:
        addresses = resolve(host.name)
        if not addresses:
            raise UserError(
                f"{where}, line {host.line}: {host.name} is not known to this machine; correct it, or add it to DNS or "
                "/etc/hosts"
            )
        for address in addresses:
            if address in owners and owners[address] != host and not address.startswith(("127.", "::1")):
                raise UserError(
                    f"{where}: {owners[address].name} (line {owners[address].line}) and {host.name} (line {host.line}) are "
                    f"the same machine, {address}; name it once"
                )
            owners[address] = host
    if not any(is_local(host.name) for host in hosts):
        return [f"{where} does not name this machine, which will only start the others"]
    return []


def spread(hosts: Sequence[Host], processes: int | None, per_host: int | None) -> list[tuple[Host, int]]:
    """How many processes each host gets: `per_host` each, else its slots, else evenly; filled in the file's order."""
    if processes is None:
        processes = sum(per_host or host.slots or 1 for host in hosts)
    if per_host is None and all(host.slots is None for host in hosts):
        per_host = -(-processes // len(hosts))
    counts = []
    left = processes
    for host in hosts:
        count = min(left, per_host or host.slots or 1)
        counts.append((host, count))
        left -= count
    if left:
        room = processes - left
        raise UserError(
            f"{processes} processes were requested, but the hosts take {room}; add hosts or slots, or raise -ppn"
        )
    return [(host, count) for host, count in counts if count]
