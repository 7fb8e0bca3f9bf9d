"""What all Kubernetes manifests have in common, the pod, and the Service and Job that `--emit kubernetes` prints.

Nothing of a job survives its pods but what lies on a volume, so a job that is started again finds its checkpoints only there.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import yaml

from stoker.distributed.job_store import SECRET
from stoker.errors import UserError
from stoker.launch.launch_plan import DEFAULT_PORT, counts
from stoker.launch.options import Options, to_flags

__all__ = [
    "CACHE", "CLAIM", "claim_volume", "container", "documents", "job_manifests", "launch_words", "literal", "node_selector",
    "pod", "resources", "run_variable", "secret_manifest", "secret_variable", "user_words",
]  # fmt: skip

CACHE = "/cache"
"""Where the volume for caches is mounted."""
CLAIM = "claim"
"""The name of that volume, if it is a claim of the user."""
_SECRET_KEY = "job"
_GROUP = 1000
"""Of the user in Stoker's image (container/runtime.sh); volumes are made writable for it."""
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_PLAIN = r"(?![yYnN]$)(--?)?[A-Za-z/$].*"
"""Texts that may stay without quotes if PyYAML finds that they need none. PyYAML follows YAML 1.1, kubectl largely YAML 1.2: to
kubectl `3e-5` and `0o17` are numbers, to some versions of it `y` is a truth value, and an argument that is no text is refused."""


def literal(word: str) -> str:
    """Escapes $(NAME) in the user's arguments, which Kubernetes would replace by a variable."""
    return word.replace("$", "$$") if "$(" in word or "$$" in word else word


def launch_words(options: Options, own: Iterable[str] = ()) -> list[str]:
    """The command of a container; `own` are options of this kind of job, in which Kubernetes replaces variables."""
    return ["stoker", "launch", *own, *map(literal, user_words(options))]


def user_words(options: Options) -> list[str]:
    """The part of the command that comes from the user: options for the ranks, script and arguments."""
    return [*to_flags(options), *["-m"] * options.module, options.script, *options.arguments]


def run_variable(name: str, words: Sequence[str]) -> dict[str, str]:
    """The same for the same manifest, so that a job that Kubernetes starts again resumes from its own checkpoints."""
    return {"name": "STOKER_RUN_ID", "value": f"{name}-{hashlib.sha256(repr(words).encode()).hexdigest()[:12]}"}


def secret_variable(name: str) -> dict[str, Any]:
    """The secret of the job of this name, which is known to its pods only."""
    return {"name": SECRET, "valueFrom": {"secretKeyRef": {"name": f"{name}-secret", "key": _SECRET_KEY}}}


def secret_manifest(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"{name}-secret"},
        "stringData": {_SECRET_KEY: secrets.token_hex(16)},
    }


def container(
    options: Options, name: str, command: Sequence[str], variables: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    image = options.emit_image
    if not image:
        raise UserError(
            f"--emit {options.emit} needs --emit_image, a container image with your script, torch and stoker in it"
        )
    if not re.fullmatch(r"\w[\w./:@-]*", image, re.ASCII):
        raise UserError(f"--emit_image {image!r} is not the name of an image, such as registry/name:tag")
    found: dict[str, Any] = {
        "name": name,
        "image": image,
        "command": list(command),
        "env": [{"name": "HF_HOME", "value": f"{CACHE}/huggingface"}, *variables],
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": CLAIM if options.emit_cache else "cache", "mountPath": CACHE},
        ],
    }
    if limits := resources(options):
        found["resources"] = limits
    return found


def resources(options: Options) -> dict[str, dict[str, str]]:
    """Requests equal limits: only then, and with whole CPUs, does a node reserve cores for a pod (QoS class Guaranteed)."""
    local = counts(options)[1]
    cpus, memory = options.emit_cpus, options.emit_memory
    if cpus is None and options.threads:
        cpus = options.threads * local
    if cpus is not None and cpus < (options.threads or 1) * local:
        raise UserError(
            f"--emit_cpus {cpus}: {local} processes per pod need {(options.threads or 1) * local}; raise it, or lower -ppn or "
            "--num_cpu_threads_per_process"
        )
    if memory and not re.fullmatch(r"[1-9][0-9]*(\.[0-9]+)?([kMGTP]|[KMGTP]i)?", memory, re.ASCII):
        raise UserError(f"--emit_memory {memory!r} is not an amount of memory, such as 64Gi")
    amounts = {**({"cpu": str(cpus)} if cpus else {}), **({"memory": memory} if memory else {})}
    return {"requests": dict(amounts), "limits": dict(amounts)} if amounts else {}


def pod(options: Options, *containers: dict[str, Any]) -> dict[str, Any]:
    return {
        **node_selector(options),
        "securityContext": {"fsGroup": _GROUP},
        "containers": list(containers),
        "volumes": [
            # The 64 MB of a container's own /dev/shm are too little for processes that exchange gradients through it.
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            claim_volume(options) if options.emit_cache else {"name": "cache", "emptyDir": {}},
        ],
    }


def claim_volume(options: Options) -> dict[str, Any]:
    claim = options.emit_cache or ""
    if len(claim) > 253 or not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", claim, re.ASCII):
        raise UserError(f"--emit_cache {claim!r} is not the name of a PersistentVolumeClaim, such as training-data")
    return {"name": CLAIM, "persistentVolumeClaim": {"claimName": claim}}


def node_selector(options: Options) -> dict[str, dict[str, str]]:
    for key, value in options.emit_node_selector:
        prefix, slash, name = key.rpartition("/")
        is_domain = not slash or (
            len(prefix) <= 253 and re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", prefix, re.ASCII)
        )
        if (
            not is_domain
            or not re.fullmatch(_LABEL, name, re.ASCII)
            or not re.fullmatch(f"({_LABEL})?", value, re.ASCII)
        ):
            raise UserError(f"--emit_node_selector {key}={value} is not a label of Kubernetes, such as disk=ssd")
    return {"nodeSelector": dict(options.emit_node_selector)} if options.emit_node_selector else {}


class _Dumper(yaml.SafeDumper):
    """Quotes what any parser of yaml could take for something other than text."""


def _quoted(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    is_plain = re.fullmatch(_PLAIN, text, re.ASCII | re.DOTALL)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_plain else "'")


_Dumper.add_representer(str, _quoted)


def documents(*found: dict[str, Any]) -> str:
    return "---\n" + "---\n".join(yaml.dump(document, Dumper=_Dumper, sort_keys=False) for document in found)


def job_manifests(options: Options, name: str) -> str:
    """A Job, and for several machines a Service by which they find machine 0 and the secret by which they know each other."""
    total, _, machines = counts(options)
    port = options.main_process_port or DEFAULT_PORT
    own = ["--num_processes", str(total)]
    if options.max_restarts:
        own += ["--max_restarts", str(options.max_restarts)]
    if machines > 1:
        least = f"{options.min_machines}:" if options.min_machines else ""
        own += ["--num_machines", f"{least}{machines}", "--machine_rank", "$(JOB_COMPLETION_INDEX)"]
        own += ["--main_process_ip", f"{name}-0.{name}", "--main_process_port", str(port)]
    words = launch_words(options, own)
    secret = [secret_variable(name)] if machines > 1 else []
    main = container(options, "stoker", words, [run_variable(name, words), *secret])
    if machines > 1:
        main["ports"] = [{"containerPort": port, "name": "rendezvous"}]
    spec = {"restartPolicy": "Never", **pod(options, main)}
    if machines > 1:
        spec["subdomain"] = name
    metadata = {"name": name, "labels": {"app": name}}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "completions": machines,
            "parallelism": machines,
            "completionMode": "Indexed",
            # When one pod fails, so do the others, and each counts.
            "backoffLimit": options.allowed_restarts * machines,
            "template": {"metadata": {"labels": {"app": name}}, "spec": spec},
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"app": name},
            "ports": [{"name": "rendezvous", "port": port}],
        },
    }
    return documents(secret_manifest(name), service, job) if machines > 1 else documents(job)
