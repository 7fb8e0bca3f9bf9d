"""Invalid config files, and odd answers to the questions of `stoker config`."""

from __future__ import annotations

import json
import random

from attack import odd
from attack.case import Case

__all__ = ["answers", "config_file"]

_GOOD = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_CPU", "downcast_bf16": "'no'",
    "machine_rank": "0", "main_process_ip": "127.0.0.1", "main_process_port": "29500", "main_training_function": "main",
    "mixed_precision": "bf16", "num_machines": "1", "num_processes": "2", "rdzv_backend": "static", "same_network": "true",
    "use_cpu": "true", "ipex_config": "{ipex: true}", "mpirun_config": "{mpirun_ccl: '1', mpirun_hostfile: hosts}",
    "dynamo_config": "{dynamo_backend: INDUCTOR}", "stoker_config": "{launcher: torchrun, num_cpu_threads_per_process: 1}",
    "fsdp_config": "{}", "fp16": "false", "tpu_env": "[]",
}  # fmt: skip
_VALUES = [
    "", "~", "null", "[]", "{}", "[1, 2]", "{a: b}", "!!timestamp foo", "!!int abc", "!!float x", "!!binary '*'", "!!bool maybe",
    "!!set {a, b}", "!!omap [a: 1]", "!!pairs [a: 1]", "!!python/object/apply:os.system ['touch pwned']",
    "!!python/name:os.system", "!local x", "2001-13-45", "2001-01-01", "2001-12-14t21:59:43.10-05:00", "1:60:61", "0o17", ".inf",
    ".nan", "-.INF", "1e400", "'unclosed", '"\\x"', "|", ">\n\n  x", "&a *a", "*undefined", "? x", "- a", "@", "`", "%", "\t",
    "!", "<<: 1", "[" * 3000, "{a: " * 3000, "&x [*x]", "yes", "'yes'", "0.5", "-1", "1_000", "0b12",
]  # fmt: skip
_TOKENS = (
    b": ",
    b"\n- ",
    b"\t",
    b"&a ",
    b"*a",
    b"<<: ",
    b"!!",
    b"{",
    b"[",
    b"---\n",
    b"...\n",
    b"%YAML 9.9\n",
    b"? ",
    b"#",
)


def config_file(r: random.Random) -> Case:
    """A config file, given to every command that reads one."""
    name = r.choice(("c.yaml", "c.yaml", "c.yaml", "c.yml", "c.json", "c"))
    content = r.choice((_odd_values, _odd_values, _odd_values, _damaged, _nested, _noise))(r)
    if name == "c.json" and r.random() < 0.7:
        content = _json(r)
    files = {name: content, "s.py": b"", "hosts": b"localhost slots=2\n"}
    command = r.choice((
        ["config", "show", name],
        ["config", "check", name],
        ["config", "migrate", name, "-o", "new.yaml"],
        ["config", "migrate", name],
        ["launch", "--config_file", name, "--dry-run", "s.py"],
        ["launch", "--config_file", name, "-n", "2", "--dry-run", "--oversubscribe", "s.py"],
        ["launch", "--config_file", name, "--emit", "slurm", "s.py"],
        ["launch", "--config_file", name, "--emit", "kubernetes", "--emit_image", "x", "s.py"],
        ["launch", "--config_file", name, "--emit", r.choice(("trainjob", "pytorchjob", "mpijob")), "--emit_image", "x", "s.py"],
    ))  # fmt: skip
    codes = (0, 1, 2) if command[1] == "check" else (0, 2)
    return Case(command, files, writes=("new.yaml", "c.migrated.yaml"), codes=codes)


def _yaml(values: dict[str, str]) -> bytes:
    return "".join(f"{key}: {text}\n" for key, text in values.items()).encode("utf-8", "surrogatepass")


def _odd_values(r: random.Random) -> bytes:
    values = dict(_GOOD)
    for key in r.sample(list(values), r.randint(0, 8)):
        del values[key]
    for _ in range(r.choice((1, 1, 2, 4))):
        key = r.choice([*_GOOD, odd.value(r)])
        values[key] = r.choice(_VALUES) if r.random() < 0.6 else odd.value(r)
    if r.random() < 0.2:
        key = r.choice(("ipex_config", "mpirun_config", "stoker_config", "dynamo_config"))
        inner = r.choice(
            ("ipex", "mpirun_ccl", "mpirun_hostfile", "launcher", "num_cpu_threads_per_process", "dynamo_backend")
        )
        values[key] = f"{{{inner}: {r.choice(_VALUES)}}}"
    return _yaml(values)


def _damaged(r: random.Random) -> bytes:
    return odd.damage(r, _yaml(_GOOD), _TOKENS)


def _nested(r: random.Random) -> bytes:
    """Deep and wide documents, and aliases that multiply."""
    depth = r.choice((5, 12, 40, 2000))
    return r.choice((
        lambda: "a: " + "[" * depth + "]" * depth,
        lambda: "".join(" " * level + "a:\n" for level in range(min(depth, 400))),
        lambda: "a0: &a0 [x, x]\n"
        + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, depth % 50 + 2))
        + f"{r.choice(list(_GOOD))}: *a{depth % 50 + 1}\n",
        lambda: "k0: &k0 {x: 1}\n"
        + "".join(f"k{n}: &k{n}\n  <<: [*k{n - 1}, *k{n - 1}]\n" for n in range(1, depth % 50 + 2)),
        lambda: "".join(f"key{n}: {n}\n" for n in range(20_000)),
        lambda: "x: " + "y" * 3_000_000 + "\n",
        lambda: "num_processes: 2\n" * 500,
    ))().encode()  # fmt: skip


def _noise(r: random.Random) -> bytes:
    return r.choice((
        b"", b"\n", b"#", b"---\n---\n", b"just words", b"- a\n- b\n", b"1: 2\n", b"true: x\n", b"? [a, b]\n: c\n",
        b"? {a: b}\n: c\n", b"null: 1\n", b"a\0b: c", b"\xff\xfe", b"%TAG ! tag:x,2000:\n---\na: !x b\n", r.randbytes(200),
        odd.text(r).encode("utf-8", "surrogatepass"),
    ))  # fmt: skip


def _json(r: random.Random) -> bytes:
    good: dict[str, object] = {
        "distributed_type": "MULTI_CPU",
        "num_processes": 2,
        "mixed_precision": "no",
        "num_machines": 1,
    }
    key = r.choice([*good, "ipex_config", "mpirun_config"])
    good[key] = r.choice((None, [], {}, 1.5, -1, 10**400, float("nan"), True, "x", [[[]]], {"mpirun_ccl": []}))
    data = json.dumps(good).encode()
    return data if r.random() < 0.5 else odd.damage(r, data)


def answers(r: random.Random) -> Case:
    """`stoker config` with answers from a pipe, and flags, most of them wrong."""
    lines = [r.choice(("", "0", "1", "2", "yes", "no", "NO", "MULTI_CPU", "torchrun", "impi", "bf16")) if r.random() < 0.6
             else odd.value(r) for _ in range(r.randint(0, 16))]  # fmt: skip
    stdin = "\n".join(lines).encode("utf-8", "surrogatepass")
    if r.random() < 0.15:
        stdin = odd.damage(r, stdin)
    argv = ["config", "--config_file", r.choice(("new.yaml", "new.yaml", "new.yaml", "in/a/new.yaml"))]
    for _ in range(r.choice((0, 0, 1, 3))):
        flag = r.choice(("--distributed_type", "--num_machines", "--launcher", "--mixed_precision", "--num_processes", "--ipex",
                         "--main_process_port", "--machine_rank", "--use_cpu", "--num_cpu_threads_per_process"))  # fmt: skip
        argv += [flag, odd.word(r)]
    if r.random() < 0.2:
        argv.append("--yes")
    return Case(argv, stdin=stdin, writes=("new.yaml", "in"))
