"""The recorded machines: what lscpu, /proc/cpuinfo and the cgroup files say on computers that people train on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from machine.recorded.layout import CacheShape, Shape

_X86 = "fpu de tsc msr pae cx8 apic sse sse2 ht syscall nx rdtscp lm constant_tsc ssse3 sse4_1 sse4_2 popcnt aes avx"
_AVX2 = f"{_X86} f16c fma bmi1 avx2 bmi2"
_AVX512 = f"{_AVX2} avx512f avx512dq avx512cd avx512bw avx512vl"
_ICE_LAKE = f"{_AVX512} avx512_vbmi avx512_vbmi2 gfni vaes vpclmulqdq avx512_vnni avx512_bitalg avx512_vpopcntdq"
_SAPPHIRE_RAPIDS = f"{_ICE_LAKE} avx_vnni avx512_bf16 amx_bf16 avx512_fp16 amx_tile amx_int8"
_GENOA = f"{_AVX512} avx512_bf16 avx512_vbmi avx512_vbmi2 avx512_vnni avx512_bitalg avx512_vpopcntdq"
_GRAVITON3 = (
    "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop sha3 sm3 sm4 "
    "asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm ssbs paca pacg dcpodp svei8mm svebf16 i8mm bf16 dgh rng"
)


def _intel(name: str, model: int, stepping: int, flags: str) -> dict[str, str]:
    numbers = {"cpu family": "6", "model": str(model), "model name": name, "stepping": str(stepping)}
    return {"vendor_id": "GenuineIntel", **numbers, "cpu MHz": "1900.000", "flags": flags}


def _amd(name: str, family: int, model: int, flags: str) -> dict[str, str]:
    numbers = {"cpu family": str(family), "model": str(model), "model name": name, "stepping": "1"}
    return {"vendor_id": "AuthenticAMD", **numbers, "cpu MHz": "2400.000", "flags": flags}


def _private(cores: int) -> Callable[[int], tuple[int, ...]]:
    """SMT as servers number it: the second thread of core c is CPU c + all cores."""
    return lambda cpu: (cpu % cores, cpu % cores + cores)


def _server(sockets: int, per_socket: int, nodes_per_socket: int, *, l3_cores: int, **rest: object) -> Shape:
    """Sockets of equal cores with SMT, NUMA nodes of neighbouring cores, a last cache shared by `l3_cores` cores."""
    cores = sockets * per_socket
    per_node = per_socket // nodes_per_socket

    def block(cpu: int, size: int) -> tuple[int, ...]:
        first = cpu % cores // size * size
        return (*range(first, first + size), *range(first + cores, first + cores + size))

    l1d, l1i, l2, l3 = rest.pop("sizes")  # type: ignore[misc]
    private = _private(cores)
    return Shape(
        cpus=2 * cores,
        socket=lambda cpu: cpu % cores // per_socket,
        core_id=lambda cpu: cpu % cores % per_socket,
        siblings=private,
        nodes={n: block(n * per_node, per_node) for n in range(sockets * nodes_per_socket)},
        distances=lambda a, b: 10 if a == b else 12 if a // nodes_per_socket == b // nodes_per_socket else 21,
        caches=(
            CacheShape(level=1, kind="Data", size=l1d, shared=private),
            CacheShape(level=1, kind="Instruction", size=l1i, shared=private),
            CacheShape(level=2, kind="Unified", size=l2, shared=private),
            CacheShape(level=3, kind="Unified", size=l3, shared=lambda cpu: block(cpu, l3_cores)),
        ),
        files={**_shm("rw,nosuid,nodev"), **_BASE_FREQUENCY},
        **rest,  # type: ignore[arg-type]
    )


def _shm(options: str, more: str = "") -> dict[str, str]:
    """mountinfo with the cgroup version 2 mount of a systemd machine and /dev/shm."""
    return {
        "/proc/self/cgroup": "0::/user.slice/user-1000.slice/session-3.scope\n",
        "/proc/self/mountinfo": (
            "30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
            f"31 23 0:27 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs tmpfs {options}\n{more}"
        ),
        "/sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory hugetlb pids rdma misc\n",
        "/sys/fs/cgroup/user.slice/memory.max": "max\n",
        "/sys/fs/cgroup/user.slice/cpu.max": "max 100000\n",
        "/sys/fs/cgroup/user.slice/user-1000.slice/pids.max": "680466\n",
    }


_BASE_FREQUENCY = {"/sys/devices/system/cpu/cpu0/cpufreq/base_frequency": "2000000\n"}


def sapphire_rapids(nodes_per_socket: int) -> Shape:
    """Two Xeon Platinum 8480+ (56 cores, AMX), with sub-NUMA clustering into 2 or 4 nodes per socket; 1 TB."""
    return _server(
        2,
        56,
        nodes_per_socket,
        l3_cores=56,
        sizes=("48K", "32K", "2048K", "107520K"),
        cpuinfo=_intel("Intel(R) Xeon(R) Platinum 8480+", 143, 8, _SAPPHIRE_RAPIDS),
        memory_kb=1056493440,
        node_memory_kb=1056493440 // (2 * nodes_per_socket),
    )


def ice_lake() -> Shape:
    """Two Xeon Platinum 8380 (40 cores, AVX-512 without bf16)."""
    return _server(
        2,
        40,
        1,
        l3_cores=40,
        sizes=("48K", "32K", "1280K", "61440K"),
        cpuinfo=_intel("Intel(R) Xeon(R) Platinum 8380 CPU @ 2.30GHz", 106, 6, _ICE_LAKE),
        memory_kb=527813132,
        node_memory_kb=263906566,
    )


def genoa() -> Shape:
    """Two EPYC 9654 (96 cores, AVX-512 with bf16), a 32 MB cache for each eight cores."""
    return _server(
        2,
        96,
        1,
        l3_cores=8,
        sizes=("32K", "32K", "1024K", "32768K"),
        cpuinfo=_amd("AMD EPYC 9654 96-Core Processor", 25, 17, _GENOA),
        memory_kb=1584823296,
        node_memory_kb=792411648,
    )


def avx2_vm() -> Shape:
    """A virtual machine of four vCPUs, which QEMU shows as four sockets; no NUMA, no cache files, no cpufreq."""
    return Shape(
        cpus=4,
        cpuinfo={
            **_intel("Intel Core Processor (Haswell, no TSX)", 60, 1, f"{_AVX2} hypervisor"),
            "cpu MHz": "2394.454",
        },
        socket=lambda cpu: cpu,
        core_id=lambda cpu: 0,
        memory_kb=16374552,
        files=_shm("rw"),
    )


def hybrid_laptop() -> Shape:
    """Core i7-12700H: six performance cores with two threads each (0-11), eight efficiency cores (12-19)."""

    def pair(cpu: int) -> tuple[int, ...]:
        return (cpu // 2 * 2, cpu // 2 * 2 + 1) if cpu < 12 else (cpu,)

    def module(cpu: int) -> tuple[int, ...]:
        return pair(cpu) if cpu < 12 else tuple(range(12 + (cpu - 12) // 4 * 4, 16 + (cpu - 12) // 4 * 4))

    return Shape(
        cpus=20,
        cpuinfo=_intel("12th Gen Intel(R) Core(TM) i7-12700H", 154, 3, f"{_AVX2} avx_vnni"),
        core_id=lambda cpu: cpu // 2 * 4 if cpu < 12 else 24 + cpu - 12,
        siblings=pair,
        nodes={0: tuple(range(20))},
        node_memory_kb=32522660,
        memory_kb=32522660,
        caches=(
            CacheShape(level=1, kind="Data", size="48K", shared=pair),
            CacheShape(level=1, kind="Instruction", size="32K", shared=pair),
            CacheShape(level=2, kind="Unified", size="1280K", shared=module),
            CacheShape(level=3, kind="Unified", size="24576K", shared=lambda cpu: tuple(range(20))),
        ),
        files={**_shm("rw"), "/sys/devices/cpu_core/cpus": "0-11\n", "/sys/devices/cpu_atom/cpus": "12-19\n"},
    )


def graviton() -> Shape:
    """c7g.16xlarge: 64 Neoverse V1 cores with SVE and bf16, one thread each."""
    return Shape(
        cpus=64,
        cpuinfo={
            "BogoMIPS": "2100.00",
            "Features": _GRAVITON3,
            "CPU implementer": "0x41",
            "CPU architecture": "8",
            "CPU variant": "0x1",
            "CPU part": "0xd40",
            "CPU revision": "1",
        },
        nodes={0: tuple(range(64))},
        node_memory_kb=129790780,
        memory_kb=129790780,
        caches=(
            CacheShape(level=1, kind="Data", size="64K", shared=lambda cpu: (cpu,)),
            CacheShape(level=1, kind="Instruction", size="64K", shared=lambda cpu: (cpu,)),
            CacheShape(level=2, kind="Unified", size="1024K", shared=lambda cpu: (cpu,)),
            CacheShape(level=3, kind="Unified", size="32768K", shared=lambda cpu: tuple(range(64))),
        ),
        files={
            **_shm("rw"),
            **{f"/sys/devices/system/cpu/cpu{n}/cpu_capacity": "1024\n" for n in range(64)},
        },
    )


def _host_of_64() -> Shape:
    """Two EPYC 7543 (32 cores each), SMT switched off in the firmware: 64 CPUs."""
    return Shape(
        cpus=64,
        cpuinfo=_amd("AMD EPYC 7543 32-Core Processor", 25, 1, _AVX2),
        socket=lambda cpu: cpu // 32,
        core_id=lambda cpu: cpu % 32,
        nodes={0: tuple(range(32)), 1: tuple(range(32, 64))},
        node_memory_kb=263906566,
        memory_kb=527813132,
        caches=(
            CacheShape(level=1, kind="Data", size="32K", shared=lambda cpu: (cpu,)),
            CacheShape(level=1, kind="Instruction", size="32K", shared=lambda cpu: (cpu,)),
            CacheShape(level=2, kind="Unified", size="512K", shared=lambda cpu: (cpu,)),
            CacheShape(
                level=3, kind="Unified", size="32768K", shared=lambda cpu: tuple(range(cpu // 4 * 4, cpu // 4 * 4 + 4))
            ),
        ),
    )


def container() -> Shape:
    """`docker run --cpus 3.5 --memory 8g` on the host of 64 with cgroup version 2 and its own namespace."""
    files = {
        "/proc/self/cgroup": "0::/\n",
        "/proc/self/mountinfo": (
            "1203 1198 0:28 / /sys/fs/cgroup ro,nosuid,nodev,noexec,relatime - cgroup2 cgroup rw,nsdelegate\n"
            "1204 1197 0:105 / /dev/shm rw,nosuid,nodev,noexec,relatime - tmpfs shm rw,size=65536k,inode64\n"
        ),
        "/sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory hugetlb pids rdma\n",
        "/sys/fs/cgroup/cpu.max": "350000 100000\n",
        "/sys/fs/cgroup/cpuset.cpus.effective": "0-63\n",
        "/sys/fs/cgroup/memory.max": "8589934592\n",
        "/sys/fs/cgroup/memory.high": "max\n",
        "/sys/fs/cgroup/memory.current": "41943040\n",
        "/sys/fs/cgroup/pids.max": "max\n",
    }
    return replace(_host_of_64(), files=files)


_DOCKER_ID = "/docker/3f1f8b6f2cd1a55c5f9e4ecd5a1b8ad4ac1b4f1c3df1ffea0a7a6fb64b1a2cf0"


def container_v1() -> Shape:
    """The same with cgroup version 1, where the container sees the host's path but mounts only its own part."""
    mounts = [
        f"{40 + i} 39 0:{30 + i} {_DOCKER_ID} /sys/fs/cgroup/{name} ro,nosuid,nodev,noexec,relatime - cgroup cgroup rw,{name}"
        for i, name in enumerate(("cpu,cpuacct", "cpuset", "memory", "pids"))
    ]
    files = {
        "/proc/self/cgroup": "".join(
            f"{12 - i}:{name}:{_DOCKER_ID}\n" for i, name in enumerate(("cpu,cpuacct", "cpuset", "memory", "pids"))
        ),
        "/proc/self/mountinfo": "\n".join(mounts)
        + "\n60 39 0:50 / /dev/shm rw,nosuid,nodev,noexec,relatime - tmpfs shm rw,size=65536k\n",
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "350000\n",
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "/sys/fs/cgroup/cpuset/cpuset.cpus": "0-63\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "8589934592\n",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": "41943040\n",
        "/sys/fs/cgroup/pids/pids.max": "max\n",
    }
    return replace(_host_of_64(), files=files)


MACHINES: dict[str, Callable[[], Shape]] = {
    "sapphire_rapids_4": lambda: sapphire_rapids(2),
    "sapphire_rapids_8": lambda: sapphire_rapids(4),
    "ice_lake": ice_lake,
    "genoa": genoa,
    "avx2_vm": avx2_vm,
    "hybrid_laptop": hybrid_laptop,
    "graviton": graviton,
    "container": container,
    "container_v1": container_v1,
}
