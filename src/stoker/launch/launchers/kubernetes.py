"""The Kubernetes manifests that `--emit kubernetes` prints."""

from __future__ import annotations

import re
from typing import Any

import yaml

from stoker.errors import UserError
from stoker.launch.launch_plan import DEFAULT_PORT, counts
from stoker.launch.options import Options, to_flags

__all__ = ["manifests"]


def _unexpanded(word: str) -> str:
    """Escapes $(NAME) in the user's arguments, which Kubernetes would replace by a variable."""
    return word.replace("$", "$$") if "$(" in word or "$$" in word else word


def manifests(options: Options, name: str) -> str:
    """A Job, and for several machines a Service by which they find machine 0."""
    total, local, machines = counts(options)
    image = options.emit_image
    if not image:
        raise UserError(
            "--emit kubernetes needs --emit_image, a container image with your script, torch and stoker in it"
        )
    if not re.fullmatch(r"[\w][\w./:@-]*", image, re.ASCII):
        raise UserError(f"--emit_image {image!r} is not the name of an image, such as registry/name:tag")
    port = options.main_process_port or DEFAULT_PORT
    words = ["stoker", "launch", "--num_processes", str(total), *map(_unexpanded, to_flags(options))]
    if machines > 1:
        words += ["--num_machines", str(machines), "--machine_rank", "$(JOB_COMPLETION_INDEX)"]
        words += ["--main_process_ip", f"{name}-0.{name}", "--main_process_port", str(port)]
    words += map(_unexpanded, ["-m"] * options.module + [options.script, *options.arguments])
    container: dict[str, Any] = {
        "name": "stoker",
        "image": image,
        "command": words,
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    if options.threads:
        cpus = str(options.threads * local)
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
    metadata = {"name": name, "labels": {"app": name}}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
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
        "metadata": metadata,
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"app": name},
            "ports": [{"name": "rendezvous", "port": port}],
        },
    }
    documents = [service, job] if machines > 1 else [job]
    return "---\n" + "---\n".join(yaml.safe_dump(document, sort_keys=False) for document in documents)
