"""Manifests for Kubernetes and Kubeflow: valid by the published schemas, with what CPU training needs, every word quoted.

TrainJob, ClusterTrainingRuntime, Job, Service and all pods are validated by the package kubeflow-trainer-api, whose classes are
generated from the published OpenAPI schemas. PyTorchJob and MPIJob have no such package: the fields that are used of them, and
their types, are written down below from their custom resource definitions (kubeflow.org_pytorchjobs.yaml of Training Operator
1.9.4, kubeflow.org_mpijobs.yaml of MPI Operator 0.8.2). No cluster runs here; tests/launch/test_pods.py runs the commands.
"""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Iterator
from typing import Any

import jsonschema
import kubeflow_trainer_api.models as api
import pydantic
import pytest
import yaml

from stoker.cli.launch import parse
from stoker.launch.launchers.emit import emit

KINDS = ("kubernetes", "trainjob", "pytorchjob", "mpijob")
HOSTILE = ["a b", "$(touch pwned)", "it's", '"', "new\nline", "$HOME", "$$(X)", ": x", "- y", "#z", "null", "yes", "0x10", "{a}",
           "*b", "&c", "!d", "\t", "é", "", "🦆", "\\", "%",
           "3e-5", "+1E5", "0o17", "y", "N", "-1e5", "1__0", ".5e1"]  # fmt: skip
ALL = ["--emit_cpus", "16", "--emit_memory", "64Gi", "--emit_cache", "data", "--emit_node_selector", "disk=ssd",
       "--emit_node_selector", "example.com/numa=true", "--max_restarts", "2"]  # fmt: skip

COUNT, TEXT = {"type": "integer", "minimum": 0}, {"type": "string"}


def fields(required: str = "", **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False, "required": required.split()}


REPLICA = fields("replicas template", replicas=COUNT, restartPolicy=TEXT, template={"type": "object"})
SCHEMAS = {
    "PyTorchJob": fields(
        "pytorchReplicaSpecs",
        nprocPerNode=TEXT,
        elasticPolicy=fields(
            rdzvBackend={"enum": ["c10d", "etcd", "etcd-v2"]}, minReplicas=COUNT, maxReplicas=COUNT, maxRestarts=COUNT
        ),
        runPolicy=fields(backoffLimit=COUNT),
        pytorchReplicaSpecs=fields("Worker", Worker=REPLICA),
    ),
    "MPIJob": fields(
        "mpiReplicaSpecs",
        slotsPerWorker=COUNT,
        mpiImplementation={"enum": ["OpenMPI", "Intel", "MPICH"]},
        sshAuthMountPath=TEXT,
        launcherCreationPolicy={"enum": ["AtStartup", "WaitForWorkersReady"]},
        runPolicy=fields(cleanPodPolicy={"enum": ["None", "Running", "All"]}, backoffLimit=COUNT),
        mpiReplicaSpecs=fields("Launcher Worker", Launcher=REPLICA, Worker=REPLICA),
    ),
}
MODELS = {
    "TrainJob": api.TrainerV1alpha1TrainJob,
    "ClusterTrainingRuntime": api.TrainerV1alpha1ClusterTrainingRuntime,
    "Job": api.IoK8sApiBatchV1Job,
    "Service": api.IoK8sApiCoreV1Service,
}
VERSIONS = {
    "TrainJob": "trainer.kubeflow.org/v1alpha1", "ClusterTrainingRuntime": "trainer.kubeflow.org/v1alpha1", "Job": "batch/v1",
    "Service": "v1", "Secret": "v1", "PyTorchJob": "kubeflow.org/v1", "MPIJob": "kubeflow.org/v2beta1",
}  # fmt: skip


def manifests(kind: str, *words: str) -> list[dict[str, Any]]:
    text = emit(parse(["--emit", kind, "--emit_image", "registry/name:tag", *words]))
    assert "&id0" not in text, "an alias of yaml, which people do not expect"
    return list(yaml.safe_load_all(text))


def validate(document: dict[str, Any]) -> None:
    kind = document["kind"]
    assert document["apiVersion"] == VERSIONS[kind]
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?", document["metadata"]["name"])
    if kind == "Secret":
        assert re.fullmatch(r"[0-9a-f]{32}", document["stringData"]["job"])
        return
    if kind in MODELS:
        validate_by(MODELS[kind], document)
        return
    jsonschema.validate(document["spec"], SCHEMAS[kind])
    for replica in replicas(document).values():
        validate_by(api.IoK8sApiCoreV1PodTemplateSpec, replica["template"])


def validate_by(model: Any, value: dict[str, Any]) -> None:
    """The classes check types; fields that they do not have they leave out. They add defaults."""
    lost = list(missing(model.from_dict(copy.deepcopy(value)).to_dict(), value))
    assert not lost, f"not in the schema: {lost}"


def missing(found: Any, value: Any, where: str = "") -> Iterator[str]:
    if isinstance(value, dict) and isinstance(found, dict):
        for key, item in value.items():
            yield from missing(found[key], item, f"{where}.{key}") if key in found else [f"{where}.{key}"]
    elif isinstance(value, list) and isinstance(found, list) and len(value) == len(found):
        for number, item in enumerate(value):
            yield from missing(found[number], item, f"{where}[{number}]")
    elif found != value:
        yield where


def replicas(document: dict[str, Any]) -> dict[str, Any]:
    specs: dict[str, Any] = document["spec"].get("pytorchReplicaSpecs") or document["spec"]["mpiReplicaSpecs"]
    return specs


def pods(document: dict[str, Any]) -> list[dict[str, Any]]:
    spec = document.get("spec", {})
    if document["kind"] in ("PyTorchJob", "MPIJob"):
        return [replica["template"]["spec"] for replica in replicas(document).values()]
    if document["kind"] == "ClusterTrainingRuntime":
        return [job["template"]["spec"]["template"]["spec"] for job in spec["template"]["spec"]["replicatedJobs"]]
    return [spec["template"]["spec"]] if document["kind"] == "Job" else []


def command(kind: str, *words: str) -> list[str]:
    """The command that starts the training."""
    job = manifests(kind, *words)[-1]
    found: list[str] = (job["spec"]["trainer"] if kind == "trainjob" else pods(job)[0]["containers"][0])["command"]
    return found


def expand(word: str) -> str:
    """A word of a command as Kubernetes expands it: $$ is $, $(NAME) a variable."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda match: "$" if match[0] == "$$" else f"<{match[1]}>", word)


@pytest.mark.parametrize("more", [[], ALL, ["--num_cpu_threads_per_process", "4"]])
@pytest.mark.parametrize("machines", ["1", "3"])
@pytest.mark.parametrize("kind", KINDS)
def test_manifests_are_valid_by_the_published_schemas(kind: str, machines: str, more: list[str]) -> None:
    found = manifests(kind, "--num_machines", machines, "-ppn", "2", *more, "2 Train_QA.py", *HOSTILE)
    for document in found:
        validate(document)
    several = machines != "1"
    expected = {
        "kubernetes": ["Service", "Job"] if several else ["Job"], "trainjob": ["ClusterTrainingRuntime", "TrainJob"],
        "pytorchjob": ["PyTorchJob"], "mpijob": ["MPIJob"],
    }  # fmt: skip
    secret = ["Secret"] if several and kind != "mpijob" else []
    assert [document["kind"] for document in found] == secret + expected[kind]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mpijob"])
def test_pods_of_a_job_get_a_secret_of_their_own(kind: str) -> None:
    found = []
    for _ in range(2):
        secret, *_, job = manifests(kind, "--num_machines", "2", "s.py")
        main = job["spec"]["trainer"] if kind == "trainjob" else pods(job)[0]["containers"][0]
        variable = next(one for one in main["env"] if one["name"] == "STOKER_SECRET")
        assert variable["valueFrom"] == {"secretKeyRef": {"name": secret["metadata"]["name"], "key": "job"}}
        found.append(secret["stringData"]["job"])
    assert found[0] != found[1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_validation_notices_wrong_types_and_unknown_fields(kind: str) -> None:
    job = manifests(kind, "--num_machines", "2", "s.py")[-1]
    with pytest.raises((pydantic.ValidationError, jsonschema.ValidationError, AssertionError)):
        validate({**job, "spec": {**job["spec"], "unknown": 1}})
    if kind != "trainjob":
        pods(job)[0]["containers"][0]["image"] = 7
    else:
        job["spec"]["trainer"]["image"] = 7
    with pytest.raises(pydantic.ValidationError):
        validate(job)


@pytest.mark.parametrize("kind", KINDS)
def test_every_word_of_the_user_arrives_unchanged(kind: str) -> None:
    words = command(kind, "--num_machines", "2", "-genv", "A=$(B) 'c'", "it's $(me).py", *HOSTILE)
    expanded = [expand(word) for word in words]
    assert expanded[-len(HOSTILE) - 1 :] == ["it's $(me).py", *HOSTILE]
    assert expanded[expanded.index("-genv") + 1] == "A=$(B) 'c'"
    again = parse(expanded[2:] if kind != "kubernetes" else [*expanded[2:6], *expanded[8:]])  # without --machine_rank
    assert (again.script, again.arguments, again.genv) == ("it's $(me).py", HOSTILE, (("A", "$(B) 'c'"),))


GO_VALUES = (
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?0[box][0-9a-fA-F]+|y|n|yes|no|on|off|true|false|null|~|"
)
"""Plain scalars that kubectl's parser (go-yaml) does not read as text: numbers of YAML 1.2 and truth values of YAML 1.1."""


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_are_text_to_kubectl_as_well(kind: str) -> None:
    options = ["--num_machines", "2", "--emit_node_selector", "speed=1e5", "--emit_node_selector", "y=n"]
    text = emit(parse(["--emit", kind, "--emit_image", "i", *options, "y.py", "--learning_rate", "3e-5", *HOSTILE]))
    scalars = [event for event in yaml.parse(text) if isinstance(event, yaml.ScalarEvent) and event.style is None]
    misread = {one.value for one in scalars if re.fullmatch(GO_VALUES, one.value, re.IGNORECASE)}
    assert all(re.fullmatch(r"\d+|true", value) for value in misread), (
        misread
    )  # counts, ports and flags of the manifest
    job = list(yaml.safe_load_all(text))[-1]
    assert list(walk(job)).count("3e-5") == 2


def walk(value: Any) -> Iterator[Any]:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    yield from (leaf for child in children for leaf in walk(child))
    if not isinstance(value, dict | list):
        yield value


def test_a_trainjob_takes_more_words_than_its_schema_allows_by_a_shell() -> None:
    words = command("trainjob", "s.py", *HOSTILE * 10)
    assert len(words) == 3
    assert shlex.split(expand(words[2])) == ["exec", "stoker", "launch", "s.py", *HOSTILE * 10]


@pytest.mark.parametrize("kind", KINDS)
def test_pods_have_what_training_on_cpus_needs(kind: str) -> None:
    documents = manifests(kind, "--num_machines", "2", "-ppn", "2", *ALL, "s.py")
    for pod in [pod for document in documents for pod in pods(document)]:
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["shm"]["emptyDir"] == {"medium": "Memory"}
        mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts["/dev/shm"] == "shm"
        assert mounts["/cache"] in volumes
        assert {"name": "HF_HOME", "value": "/cache/huggingface"} in pod["containers"][0]["env"]
    job = documents[-1]
    if kind == "trainjob":
        given = job["spec"]["trainer"]["resourcesPerNode"]
        patch = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
        pod = patch["template"]["spec"]["template"]["spec"]
    else:
        pod = pods(job)[-1]  # of an MPIJob, the workers'
        given = pod["containers"][0]["resources"]
    assert given["requests"] == given["limits"] == {"cpu": "16", "memory": "64Gi"}
    assert pod["nodeSelector"] == {"disk": "ssd", "example.com/numa": "true"}
    assert {"name": "claim", "persistentVolumeClaim": {"claimName": "data"}} in pod["volumes"]
    assert {"name": "claim", "mountPath": "/cache"} in pod["containers"][0]["volumeMounts"]


def test_cpus_follow_from_threads() -> None:
    job = manifests("kubernetes", "-n", "2", "--num_cpu_threads_per_process", "4", "s.py")[-1]
    assert pods(job)[0]["containers"][0]["resources"]["limits"] == {"cpu": "8"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_manifest_is_the_same_run_and_another_is_not(kind: str) -> None:
    def run(*words: str) -> str:
        job = manifests(kind, *words)[-1]
        main = job["spec"]["trainer"] if kind == "trainjob" else pods(job)[0]["containers"][0]
        return next(one["value"] for one in main["env"] if one["name"] == "STOKER_RUN_ID")

    assert run("s.py", "--lr", "1") == run("s.py", "--lr", "1") != run("s.py", "--lr", "2")


def test_restarts_are_left_to_what_can_restart() -> None:
    words = ("--num_machines", "3", "--max_restarts", "2", "s.py")
    assert manifests("kubernetes", *words)[-1]["spec"]["backoffLimit"] == 6
    assert manifests("pytorchjob", *words)[-1]["spec"]["elasticPolicy"]["maxRestarts"] == 2
    assert manifests("mpijob", *words)[-1]["spec"]["runPolicy"]["backoffLimit"] == 2
    assert command("trainjob", *words)[2:4] == ["--max_restarts", "2"]
    elastic = manifests("pytorchjob", "--nnodes", "2:3", "s.py")[-1]["spec"]["elasticPolicy"]
    assert (elastic["minReplicas"], elastic["maxReplicas"]) == (2, 3)


@pytest.mark.parametrize("words", [("--num_machines", "2", "--heal"), ("--nnodes", "1:2")])
def test_failed_pods_are_recreated_where_the_agents_wait_for_them(words: tuple[str, ...]) -> None:
    """The agents restart three times by default then, which is of no use if the pod itself never comes back."""
    assert manifests("kubernetes", *words, "s.py")[-1]["spec"]["backoffLimit"] == 6
    assert manifests("pytorchjob", *words, "s.py")[-1]["spec"]["runPolicy"]["backoffLimit"] == 6
