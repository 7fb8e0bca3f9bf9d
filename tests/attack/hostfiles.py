"""Invalid hostfiles, for every MPI that reads them."""

from __future__ import annotations

import random

from attack import odd
from attack.case import Case

__all__ = ["hostfile"]

_LINES = [
    "localhost", "localhost:2", "localhost slots=2", "127.0.0.1", "[::1]:4", "::1", "fe80::1%lo", "localhost slots=2 max_slots=4",
    "localhost slots=0", "localhost slots=-1", "localhost slots=" + "9" * 5000, "localhost:" + "9" * 5000, "localhost:99999999",
    "localhost:0", "localhost:x", "localhost slots=x", "localhost slots = 3", "localhost slots=２", "host with spaces",
    "-oProxyCommand=touch pwned", "--help", "$(touch pwned)", "`touch pwned`", "user@localhost", "localhost;touch pwned",
    "a" * 254, "a." * 150, ".", "..", "-", "_", "256.256.256.256", "0", "1.2.3", "0x7f000001", "[", "[]", "[::1", "[::1]:",
    ":::", "%", "localhost # comment", "# only a comment", "", " ", "\t", "\0", "localhost\0", "\ufeff", "☃", "xn--n3h",
    "LOCALHOST", "\x1b[31m", "nonexistent.invalid", "localhost,localhost", "localhost slots=1 slots=2", "localhost n=3 cpu=4",
]  # fmt: skip


def hostfile(r: random.Random) -> Case:
    name = "hosts"
    files, links = {"s.py": b""}, {}
    if r.random() < 0.9:
        lines = r.choices(_LINES, k=r.choice((0, 1, 1, 2, 3, 30)))
        if r.random() < 0.3:
            lines.append(odd.value(r))
        content = r.choice(("\n", "\n", "\r\n", "\r", "\x0b")).join(lines).encode("utf-8", "surrogatepass")
        if r.random() < 0.2:
            content = odd.damage(r, content, (b"slots=", b":", b"[", b"#"))
        if r.random() < 0.02:
            content *= 20_000
        files[name] = content
    else:
        name = r.choice((odd.word(r), "/dev/null", "/dev/zero", "/dev/urandom", "/proc/self/mem", ".", "link"))
        links["link"] = r.choice(("link", "/dev/zero", "nowhere", "/"))
    argv = ["launch", r.choice(("-f", "-hostfile", "--hostfile", "--mpirun_hostfile")), name]
    for flag, values in (("-n", ("1", "2", "4", "100000")), ("-ppn", ("1", "3")), ("--num_machines", ("1", "2")),
                         ("--launcher", ("auto", "impi", "mpich", "openmpi", "slurm", "torchrun")),
                         ("--main_process_ip", ("localhost", "nonexistent.invalid", "-x"))):  # fmt: skip
        if r.random() < 0.4:
            argv += [flag, r.choice(values)]
    if r.random() < 0.7:
        argv.append("--dry-run")
    return Case([*argv, "s.py"], files, links)
