"""`stoker launch --emit slurm|kubernetes`: the same launch as a batch script, or as manifests, printed instead of run.

Every word of the person's is quoted for where it goes: the shell of the batch script, or Kubernetes' own $(NAME) expansion.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

import yaml

from stoker.errors import UserError
from stoker.hf.secrets import is_secret
from stoker.launch.config.config_file import Config
from stoker.launch.options import Options
from stoker.launch.plan import counts

__all__ = ["emit"]

_PORT = 29500


def emit(options: Options, config: Config) -> str:
    machines = options.machines or config.num_machines
    total, local = counts(options, config, machines)
    if options.emit == "slurm":
        return _slurm(options, config, machines, total, local)
    return _kubernetes(options, config, machines, total, local)


def _words(options: Options, config: Config) -> list[str]:
    """The options that hold inside the job, whatever starts it."""
    words = []
    for flag, value in (
        (
            "--mixed_precision",
            options.mixed_precision or (config.mixed_precision if config.mixed_precision != "no" else None),
        ),
        ("--num_cpu_threads_per_process", options.threads or config.threads),
        ("--mpirun_ccl", options.workers if options.workers is not None else config.ccl_workers),
        ("--backend", options.backend),
        ("--log_dir", options.log_dir),
        ("--memory_allocator", options.allocator if options.allocator != "default" else None),
        ("--bind", options.bind if options.bind != "auto" else None),
        ("--ncores_per_instance", options.cores_per_process),
        ("--nodes_list", ",".join(map(str, options.nodes)) if options.nodes is not None else None),
        (
            "--dynamo_backend",
            options.dynamo_backend or (config.dynamo_backend if config.dynamo_backend != "no" else None),
        ),
    ):
        words += [flag, str(value)] if value is not None else []
    if options.ipex is False or (options.ipex is None and not config.ipex):
        words.append("--no-ipex")
    words += ["--no-compat"] * (not options.compat) + ["--use-logical-cores"] * options.logical
    words += ["--use-e-cores"] * options.efficiency + ["--oversubscribe"] * options.oversubscribe
    words += ["--no-prefix"] * (not options.prefix)
    for name, value in options.genv:
        words += ["-genv", f"{name}={value}"] if not is_secret(name) else []
    return words


def _script(options: Options) -> list[str]:
    return ["-m"] * options.module + [options.script, *options.arguments]


def _name(options: Options) -> str:
    given = options.emit_options.get("name") or options.script.rsplit("/", 1)[-1].removesuffix(".py")
    name = re.sub(r"[^a-z0-9-]+", "-", given.lower()).strip("-")[:50].strip("-")
    return name or "stoker"


def _slurm(options: Options, config: Config, machines: int, total: int, local: int) -> str:
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={_name(options)}",
        f"#SBATCH --nodes={machines}",
        f"#SBATCH --ntasks={total}",
        f"#SBATCH --ntasks-per-node={local}",
    ]
    threads = options.threads or config.threads
    if threads is not None:
        lines.append(f"#SBATCH --cpus-per-task={threads}")
    else:
        lines.append("#SBATCH --exclusive")
    for key, flag in (("time", "--time"), ("partition", "--partition")):
        if value := options.emit_options.get(key):
            if not re.fullmatch(r"[\w:.,-]+", value):
                raise UserError(f"--emit_{key} {value!r} is not something Slurm takes")
            lines.append(f"#SBATCH {flag}={value}")
    lines += ["#SBATCH --output=%x-%j.log", "", "set -euo pipefail", ""]
    if threads is None:
        lines += [
            "# All cores of a node, divided over its tasks.",
            f"export SRUN_CPUS_PER_TASK=$(( SLURM_CPUS_ON_NODE / {local} ))",
            "",
        ]
    program = ["stoker", "launch", *_words(options, config), *_script(options)]
    if ":" in program:  # srun would start what follows as another program
        program = ["sh", "-c", "exec " + shlex.join(program)]
    lines.append(shlex.join(["srun", "--kill-on-bad-exit=1", "--hint=nomultithread", *program]))
    return "\n".join(lines) + "\n"


def _unexpanded(word: str) -> str:
    """Kubernetes would put a variable in place of $(NAME) in a person's own words; $$ is its escape."""
    return word.replace("$", "$$") if "$(" in word or "$$" in word else word


def _kubernetes(options: Options, config: Config, machines: int, total: int, local: int) -> str:
    image = options.emit_options.get("image")
    if not image:
        raise UserError(
            "--emit kubernetes needs --emit_image, a container image with your script, torch and stoker in it"
        )
    if not re.fullmatch(r"[\w][\w./:@-]*", image, re.ASCII):
        raise UserError(f"--emit_image {image!r} is not the name of an image, such as registry/name:tag")
    name = _name(options)
    port = options.main_process_port or config.main_process_port or _PORT
    words = ["stoker", "launch", "--num_processes", str(total), *map(_unexpanded, _words(options, config))]
    if machines > 1:
        words += ["--num_machines", str(machines), "--machine_rank", "$(JOB_COMPLETION_INDEX)"]
        words += ["--main_process_ip", f"{name}-0.{name}", "--main_process_port", str(port)]
    words += map(_unexpanded, _script(options))
    container: dict[str, Any] = {
        "name": "stoker",
        "image": image,
        "command": words,
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    threads = options.threads or config.threads
    if threads:
        cpus = str(threads * local)
        container["resources"] = {"requests": {"cpu": cpus}, "limits": {"cpu": cpus}}
    if machines > 1:
        container["ports"] = [{"containerPort": port, "name": "rendezvous"}]
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "containers": [container],
        # The 64 MB of a container's own /dev/shm are too little for processes that exchange gradients through it.
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    if machines > 1:
        pod["subdomain"] = name
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "completions": machines,
            "parallelism": machines,
            "completionMode": "Indexed",
            "backoffLimit": options.max_restarts or 0,
            "template": {"metadata": {"labels": {"app": name}}, "spec": pod},
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"app": name},
            "ports": [{"name": "rendezvous", "port": port}],
        },
    }
    documents = [service, job] if machines > 1 else [job]
    return "---\n" + "---\n".join(yaml.safe_dump(document, sort_keys=False) for document in documents)
