"""The manifests for Kubeflow: a TrainJob with its runtime (Trainer 2), a PyTorchJob (Training Operator 1), an MPIJob.

The operators of the first two tell torchrun in PET_* variables who takes part; `stoker launch` reads them
(`stoker.launch.config.torchrun_variables`). That of the third starts sshd on the workers and gives the launcher a hostfile.
"""

from __future__ import annotations

import shlex
from typing import Any

from stoker.launch.launch_plan import counts
from stoker.launch.launchers.kubernetes import (
    CACHE,
    CLAIM,
    claim_volume,
    container,
    documents,
    launch_words,
    literal,
    node_selector,
    pod,
    resources,
    run_variable,
    secret_manifest,
    secret_variable,
    user_words,
)
from stoker.launch.options import Options

__all__ = ["mpijob", "pytorchjob", "trainjob"]

RUNTIME = "stoker-distributed"
_MOST_WORDS = 128
"""Of a command in a TrainJob."""
_MPI = {"mpich": "MPICH", "openmpi": "OpenMPI"}
_SSH_PORT = 2222
_HOME = "/home/stoker"


def trainjob(options: Options, name: str) -> str:
    """A TrainJob, and the ClusterTrainingRuntime it refers to, which is the same for all jobs of a cluster."""
    _, local, machines = counts(options)
    own = ["--max_restarts", str(options.max_restarts)] if options.max_restarts else []
    words = launch_words(options, own)
    if len(words) > _MOST_WORDS:
        words = ["sh", "-c", literal("exec " + shlex.join(["stoker", "launch", *own, *user_words(options)]))]
    main = container(options, "node", words, [run_variable(name, words), *_secret(machines, name)])
    trainer = {
        "image": main["image"],
        "numNodes": machines,
        "numProcPerNode": local,
        **({"resourcesPerNode": main["resources"]} if "resources" in main else {}),
        "command": main["command"],
        "env": main["env"],
    }
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": RUNTIME},
            "trainer": trainer,
            **_patches(options),
        },
    }
    return documents(*_secret_manifests(machines, name), _runtime(main["image"]), job)


def _runtime(image: str) -> dict[str, Any]:
    plain = Options(script="", arguments=[], emit="trainjob", emit_image=image)
    main = container(plain, "node", [], [])
    del main["command"]
    ancestor = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    node = {"restartPolicy": "Never", **pod(plain, main)}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "ClusterTrainingRuntime",
        "metadata": {"name": RUNTIME, "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": 1, "torch": {}},
            "template": {
                "spec": {
                    # A pod that fails takes the others with it, so all are made anew together.
                    "failurePolicy": {"maxRestarts": 3},
                    "replicatedJobs": [
                        {
                            "name": "node",
                            "template": {"metadata": ancestor, "spec": {"backoffLimit": 0, "template": {"spec": node}}},
                        }
                    ],
                }
            },
        },
    }


def _patches(options: Options) -> dict[str, Any]:
    """What a job has of its own in the pods of the runtime."""
    spec: dict[str, Any] = {**node_selector(options)}
    if options.emit_cache:
        # Volumes are merged by name and mounts by path: the claim takes the place of the runtime's empty directory.
        spec["volumes"] = [claim_volume(options)]
        spec["containers"] = [{"name": "node", "volumeMounts": [{"name": CLAIM, "mountPath": CACHE}]}]
    if not spec:
        return {}
    jobs = [{"name": "node", "template": {"spec": {"template": {"spec": spec}}}}]
    template = {"spec": {"replicatedJobs": jobs}}
    return {"runtimePatches": [{"manager": "stoker/launch", "trainingRuntimeSpec": {"template": template}}]}


def pytorchjob(options: Options, name: str) -> str:
    _, local, machines = counts(options)
    words = launch_words(options)
    elastic = {"rdzvBackend": "c10d", "minReplicas": options.min_machines or machines, "maxReplicas": machines}
    if options.max_restarts is not None:
        elastic["maxRestarts"] = options.max_restarts
    main = container(options, "pytorch", words, [run_variable(name, words), *_secret(machines, name)])
    worker = {"replicas": machines, "restartPolicy": "OnFailure", "template": {"spec": pod(options, main)}}
    return documents(
        *_secret_manifests(machines, name),
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": name},
            "spec": {
                "nprocPerNode": str(local),
                "elasticPolicy": elastic,
                "runPolicy": {"backoffLimit": options.allowed_restarts * machines},
                "pytorchReplicaSpecs": {"Worker": worker},
            },
        },
    )


def _secret(machines: int, name: str) -> list[dict[str, Any]]:
    """The variable by which the pods know each other, if there are several."""
    return [secret_variable(name)] if machines > 1 else []


def _secret_manifests(machines: int, name: str) -> list[dict[str, Any]]:
    return [secret_manifest(name)] if machines > 1 else []


def mpijob(options: Options, name: str) -> str:
    """Workers that run sshd, and a launcher that starts the ranks there as on any machines of a hostfile."""
    total, local, machines = counts(options)
    own = ["--hostfile", "/etc/mpi/hostfile", "--num_processes", str(total), "--nprocs_per_node", str(local)]
    kind = options.launcher if options.launcher in _MPI else "impi"
    words = launch_words(options, [*own, "--launcher", str(kind)])
    launcher = container(options, "launcher", words, [run_variable(name, words)])
    launcher["resources"] = _small(resources(options))
    worker = container(options, "worker", ["stoker-sshd"], [])
    worker["ports"] = [{"containerPort": _SSH_PORT, "name": "ssh"}]
    worker["readinessProbe"] = {"tcpSocket": {"port": _SSH_PORT}}
    return documents(
        {
            "apiVersion": "kubeflow.org/v2beta1",
            "kind": "MPIJob",
            "metadata": {"name": name},
            "spec": {
                "slotsPerWorker": local,
                "mpiImplementation": _MPI.get(str(kind), "Intel"),
                "sshAuthMountPath": f"{_HOME}/.ssh",
                "launcherCreationPolicy": "WaitForWorkersReady",
                "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": options.max_restarts or 0},
                "mpiReplicaSpecs": {
                    "Launcher": _replica(1, pod(options, launcher)),
                    "Worker": _replica(machines, pod(options, worker)),
                },
            },
        }
    )


def _replica(count: int, spec: dict[str, Any]) -> dict[str, Any]:
    return {"replicas": count, "restartPolicy": "Never", "template": {"spec": spec}}


def _small(worker: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """The launcher only starts the others and prints what they print."""
    amounts = {"cpu": "1", **({"memory": "2Gi"} if "memory" in worker.get("limits", {}) else {})}
    return {"requests": dict(amounts), "limits": dict(amounts)}
