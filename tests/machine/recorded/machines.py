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
_TURIN = f"{_GENOA} avx_vnni avx512_vp2intersect"
_GRANITE_RAPIDS = f"{_SAPPHIRE_RAPIDS} amx_fp16"
_NEOVERSE_V2 = (
    "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop sha3 asimddp sha512 "
    "sve asimdfhm dit uscat ilrcpc flagm sb paca pacg dcpodp sve2 sveaes svepmull svebitperm svesha3 flagm2 frint svei8mm "
    "svebf16 i8mm bf16 dgh rng bti"
)
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


def _threads(cores: int, smt: bool) -> Callable[[int], tuple[int, ...]]:
    """SMT as servers number it: the second thread of core c is CPU c + all cores."""
    return lambda cpu: (cpu % cores, cpu % cores + cores) if smt else (cpu,)


def _server(
    sockets: int,
    per_node: tuple[int, ...],
    *,
    l3_cores: int,
    sizes: tuple[str, str, str, str],
    cpuinfo: dict[str, str],
    memory_kb: int,
    smt: bool = True,
    within: int = 12,
    across: int = 21,
    ghz: float | None = None,
) -> Shape:
    """Sockets of equal cores, NUMA nodes of `per_node` neighbouring cores in each, a last cache shared by `l3_cores` cores."""
    per_socket, in_socket = sum(per_node), len(per_node)
    cores = sockets * per_socket
    threads = _threads(cores, smt)

    def block(first: int, size: int) -> tuple[int, ...]:
        one = tuple(range(first, first + size))
        return (*one, *(cpu + cores for cpu in one)) if smt else one

    starts = [socket * per_socket + sum(per_node[:n]) for socket in range(sockets) for n in range(in_socket)]
    l1d, l1i, l2, l3 = sizes
    return Shape(
        cpus=2 * cores if smt else cores,
        cpuinfo=cpuinfo,
        socket=lambda cpu: cpu % cores // per_socket,
        core_id=lambda cpu: cpu % cores % per_socket,
        siblings=threads,
        nodes={node: block(start, per_node[node % in_socket]) for node, start in enumerate(starts)},
        node_memory_kb=memory_kb // (sockets * in_socket),
        memory_kb=memory_kb,
        distances=lambda a, b: 10 if a == b else within if a // in_socket == b // in_socket else across,
        caches=(
            CacheShape(level=1, kind="Data", size=l1d, shared=threads),
            CacheShape(level=1, kind="Instruction", size=l1i, shared=threads),
            CacheShape(level=2, kind="Unified", size=l2, shared=threads),
            CacheShape(
                level=3, kind="Unified", size=l3, shared=lambda cpu: block(cpu % cores // l3_cores * l3_cores, l3_cores)
            ),
        ),
        files={**_shm("rw,nosuid,nodev"), **(_base_frequency(ghz) if ghz else {})},
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


def _base_frequency(ghz: float) -> dict[str, str]:
    """As intel_pstate has it; AMD's drivers have no such file."""
    return {"/sys/devices/system/cpu/cpu0/cpufreq/base_frequency": f"{int(ghz * 1e6)}\n"}


def sapphire_rapids(nodes_per_socket: int, *, smt: bool = True) -> Shape:
    """Two Xeon Platinum 8480+ (56 cores, AMX), with sub-NUMA clustering into 1, 2 or 4 nodes per socket; 1 TB."""
    return _server(
        2,
        (56 // nodes_per_socket,) * nodes_per_socket,
        l3_cores=56,
        sizes=("48K", "32K", "2048K", "107520K"),
        cpuinfo=_intel("Intel(R) Xeon(R) Platinum 8480+", 143, 8, _SAPPHIRE_RAPIDS),
        memory_kb=1056493440,
        smt=smt,
        ghz=2.0,
    )


def xeon_max(nodes_per_socket: int) -> Shape:
    """Two Xeon CPU Max 9480 (56 cores) in flat mode: after the nodes with CPUs and DDR5 come as many with HBM and no CPUs.

    Without clustering the four nodes are 0-1 with CPUs and 2-3 without, as Intel's users report them.
    """
    shape = _server(
        2,
        (56 // nodes_per_socket,) * nodes_per_socket,
        l3_cores=56,
        sizes=("48K", "32K", "2048K", "115200K"),
        cpuinfo=_intel("Intel(R) Xeon(R) CPU Max 9480", 143, 8, _SAPPHIRE_RAPIDS),
        memory_kb=527813132,
        ghz=1.9,
    )
    with_cpus, hbm_kb = 2 * nodes_per_socket, (64 << 20) // nodes_per_socket

    def distance(a: int, b: int) -> int:
        near = shape.distances(a % with_cpus, b % with_cpus)
        if (a < with_cpus) == (b < with_cpus):
            return near
        return 13 if near == 10 else near + 2

    return replace(
        shape,
        nodes={**shape.nodes, **{with_cpus + node: () for node in range(with_cpus)}},
        other_memory_kb={with_cpus + node: hbm_kb for node in range(with_cpus)},
        memory_kb=shape.memory_kb + with_cpus * hbm_kb,
        distances=distance,
    )


def granite_rapids() -> Shape:
    """Two Xeon 6980P (128 cores) with sub-NUMA clustering, the default: a node for each of three dies, of 43, 43 and 42 cores."""
    return _server(
        2,
        (43, 43, 42),
        l3_cores=128,
        sizes=("48K", "64K", "2048K", "516096K"),
        cpuinfo=_intel("Intel(R) Xeon(R) 6980P", 173, 1, _GRANITE_RAPIDS),
        memory_kb=1584823296,
        ghz=2.0,
    )


def ice_lake() -> Shape:
    """Two Xeon Platinum 8380 (40 cores, AVX-512 without bf16)."""
    return _server(
        2,
        (40,),
        l3_cores=40,
        sizes=("48K", "32K", "1280K", "61440K"),
        cpuinfo=_intel("Intel(R) Xeon(R) Platinum 8380 CPU @ 2.30GHz", 106, 6, _ICE_LAKE),
        memory_kb=527813132,
        ghz=2.0,
    )


def genoa(nodes_per_socket: int = 1) -> Shape:
    """Two EPYC 9654 (96 cores, AVX-512 with bf16), a 32 MB cache for each eight cores; NPS1, 2 or 4."""
    return _server(
        2,
        (96 // nodes_per_socket,) * nodes_per_socket,
        l3_cores=8,
        sizes=("32K", "32K", "1024K", "32768K"),
        cpuinfo=_amd("AMD EPYC 9654 96-Core Processor", 25, 17, _GENOA),
        memory_kb=1584823296,
        across=32,
    )


def turin(nodes_per_socket: int = 1) -> Shape:
    """Two EPYC 9755 (128 Zen 5 cores), a 32 MB cache for each eight cores; NPS1, 2 or 4."""
    return _server(
        2,
        (128 // nodes_per_socket,) * nodes_per_socket,
        l3_cores=8,
        sizes=("48K", "32K", "1024K", "32768K"),
        cpuinfo=_amd("AMD EPYC 9755 128-Core Processor", 26, 2, _TURIN),
        memory_kb=1584823296,
        across=32,
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


def meteor_lake() -> Shape:
    """Core Ultra 7 155H: six performance cores with two threads (0-11), eight efficiency cores (12-19), and two low-power ones on
    another die, without the last cache (20-21).
    """

    def pair(cpu: int) -> tuple[int, ...]:
        return (cpu // 2 * 2, cpu // 2 * 2 + 1) if cpu < 12 else (cpu,)

    def module(cpu: int) -> tuple[int, ...]:
        first = 12 + (cpu - 12) // 4 * 4
        return pair(cpu) if cpu < 12 else tuple(range(first, min(first + 4, 22)))

    return Shape(
        cpus=22,
        cpuinfo=_intel("Intel(R) Core(TM) Ultra 7 155H", 170, 4, f"{_AVX2} avx_vnni"),
        core_id=lambda cpu: cpu // 2 * 4 if cpu < 12 else 24 + cpu - 12,
        siblings=pair,
        nodes={0: tuple(range(22))},
        node_memory_kb=32296000,
        memory_kb=32296000,
        caches=(
            CacheShape(level=1, kind="Data", size="48K", shared=pair),
            CacheShape(level=1, kind="Instruction", size="64K", shared=pair),
            CacheShape(level=2, kind="Unified", size="2048K", shared=module),
        ),
        files={**_shm("rw"), "/sys/devices/cpu_core/cpus": "0-11\n", "/sys/devices/cpu_atom/cpus": "12-21\n"},
    )


def _arm(
    part: str, features: str, per_socket: int, *, sockets: int = 1, l2: str, l3: str, memory_kb: int, across: int = 20
) -> Shape:
    """Sockets of Neoverse cores, one node each, without SMT."""

    def whole(cpu: int) -> tuple[int, ...]:
        return tuple(range(cpu // per_socket * per_socket, (cpu // per_socket + 1) * per_socket))

    cpus = sockets * per_socket
    identity = {"CPU implementer": "0x41", "CPU architecture": "8", "CPU variant": "0x0", "CPU part": part}
    return Shape(
        cpus=cpus,
        cpuinfo={"BogoMIPS": "2000.00", "Features": features, **identity, "CPU revision": "1"},
        socket=lambda cpu: cpu // per_socket,
        core_id=lambda cpu: cpu % per_socket,
        nodes={node: whole(node * per_socket) for node in range(sockets)},
        node_memory_kb=memory_kb // sockets,
        memory_kb=memory_kb,
        distances=lambda a, b: 10 if a == b else across,
        caches=(
            CacheShape(level=1, kind="Data", size="64K", shared=lambda cpu: (cpu,)),
            CacheShape(level=1, kind="Instruction", size="64K", shared=lambda cpu: (cpu,)),
            CacheShape(level=2, kind="Unified", size=l2, shared=lambda cpu: (cpu,)),
            CacheShape(level=3, kind="Unified", size=l3, shared=whole),
        ),
        files={**_shm("rw"), **{f"/sys/devices/system/cpu/cpu{n}/cpu_capacity": "1024\n" for n in range(cpus)}},
    )


def graviton() -> Shape:
    """c7g.16xlarge: 64 Neoverse V1 cores with SVE and bf16, one thread each."""
    return _arm("0xd40", _GRAVITON3, 64, l2="1024K", l3="32768K", memory_kb=129790780)


def graviton4() -> Shape:
    """r8g.48xlarge: two sockets of 96 Neoverse V2 cores, 1.5 TB."""
    return _arm("0xd4f", _NEOVERSE_V2, 96, sockets=2, l2="2048K", l3="36864K", memory_kb=1584823296)


def grace() -> Shape:
    """Grace CPU Superchip: two sockets of 72 Neoverse V2 cores, 240 GB."""
    return _arm("0xd4f", _NEOVERSE_V2, 72, sockets=2, l2="1024K", l3="116736K", memory_kb=250675200, across=40)


def grace_hopper() -> Shape:
    """GH200: 72 Neoverse V2 cores in node 0; node 1 is the memory of the GPU, nodes 2 to 8 are empty."""
    shape = _arm("0xd4f", _NEOVERSE_V2, 72, l2="1024K", l3="116736K", memory_kb=501350400, across=80)
    return replace(
        shape,
        nodes={**shape.nodes, **dict.fromkeys(range(1, 9), ())},
        other_memory_kb={1: 99614720, **dict.fromkeys(range(2, 9), 0)},
        memory_kb=shape.memory_kb + 99614720,
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


def container_across_nodes() -> Shape:
    """`docker run --cpuset-cpus 20-59` on two Xeon 8380: 20 cores of either socket, without their second threads."""
    return _within_cpuset(ice_lake(), "20-59", "0-1")


def pod_across_nodes() -> Shape:
    """A Kubernetes pod to which the static CPU manager has given twelve whole cores: four of node 0, eight of node 1."""
    return _within_cpuset(ice_lake(), "36-47,116-127", "0-1")


def container_far_memory() -> Shape:
    """`docker run --cpuset-cpus 40-59 --cpuset-mems 0`: cores of node 1 that may only use the memory of node 0."""
    return _within_cpuset(ice_lake(), "40-59", "0")


def _within_cpuset(host: Shape, cpus: str, memory: str) -> Shape:
    files = {
        "/proc/self/cgroup": "0::/\n",
        "/proc/self/mountinfo": (
            "1203 1198 0:28 / /sys/fs/cgroup ro,nosuid,nodev,noexec,relatime - cgroup2 cgroup rw,nsdelegate\n"
            "1204 1197 0:105 / /dev/shm rw,nosuid,nodev,noexec,relatime - tmpfs shm rw,size=8388608k,inode64\n"
        ),
        "/sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory hugetlb pids rdma\n",
        "/sys/fs/cgroup/cpuset.cpus.effective": f"{cpus}\n",
        "/sys/fs/cgroup/cpuset.mems.effective": f"{memory}\n",
    }
    return replace(host, allowed=cpus, memory_nodes=memory, files={**_base_frequency(2.0), **files})


MACHINES: dict[str, Callable[[], Shape]] = {
    "sapphire_rapids_2": lambda: sapphire_rapids(1),
    "sapphire_rapids_no_smt": lambda: sapphire_rapids(1, smt=False),
    "sapphire_rapids_4": lambda: sapphire_rapids(2),
    "sapphire_rapids_8": lambda: sapphire_rapids(4),
    "xeon_max": lambda: xeon_max(1),
    "xeon_max_8": lambda: xeon_max(4),
    "granite_rapids": granite_rapids,
    "ice_lake": ice_lake,
    "genoa": genoa,
    "genoa_8": lambda: genoa(4),
    "turin": turin,
    "turin_8": lambda: turin(4),
    "avx2_vm": avx2_vm,
    "hybrid_laptop": hybrid_laptop,
    "meteor_lake": meteor_lake,
    "graviton": graviton,
    "graviton4": graviton4,
    "grace": grace,
    "grace_hopper": grace_hopper,
    "container": container,
    "container_v1": container_v1,
    "container_across_nodes": container_across_nodes,
    "pod_across_nodes": pod_across_nodes,
    "container_far_memory": container_far_memory,
}
