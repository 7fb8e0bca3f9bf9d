"""Verdicts on software, load and measured rates: each names the trouble and the one thing to do about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from stoker.machine import Machine, onednn
from stoker.machine.load import Load, between
from stoker.machine.rates import Rates, TrainingStep
from stoker.machine.software import Software, Torch
from stoker.machine.verdicts import Evidence, Verdict, verdicts
from stoker.machine.version_pairs import find_bad_pairs, untested
from stoker.requires import release

Recorded = Callable[[str], Machine]

TORCH = Torch("2.13.0+cpu", "AVX512", "mkl", "3.12.0", "GCC 13.3", None, 80, ("gloo",))
SOFTWARE = Software("3.11.7", {"torch": "2.13.0+cpu"}, TORCH, None, ("/torch/libgomp.so.1",), (), ())
RATES = Rates(80, 120.0, 4000.0, 60.0, 90.0, 12.0, 300.0, 3.0, 2.8, "2.13.0+cpu", "2026-01-01T00:00:00Z", 6.0, False)


def judge(machine: Machine, **evidence: object) -> dict[str, Verdict]:
    found = verdicts(Evidence(machine, **evidence))  # type: ignore[arg-type]
    return {verdict.subject: verdict for verdict in found}


def test_a_good_machine_gets_no_warning(recorded: Recorded) -> None:
    found = judge(recorded("ice_lake"), software=SOFTWARE, rates=RATES, load=Load(0.1, 0.0, 160), environment={})
    assert {verdict.level for verdict in found.values()} == {"good"}


def test_two_openmp_runtimes_are_a_warning(recorded: Recorded) -> None:
    software = replace(SOFTWARE, openmp=("/torch/libgomp.so.1", "/opt/libiomp5.so"))
    assert "/opt/libiomp5.so" in judge(recorded("ice_lake"), software=software)["OpenMP"].text


def test_more_threads_than_cores_are_a_warning(recorded: Recorded) -> None:
    found = judge(
        recorded("container"), software=replace(SOFTWARE, torch=replace(TORCH, threads=64, capability="AVX2"))
    )
    assert "64 threads, but only 3 can run at once" in found["oversubscription"].text
    assert found["oversubscription"].action == "Run with OMP_NUM_THREADS=3."


def test_one_thread_on_many_cores_is_a_warning(recorded: Recorded) -> None:
    software = replace(SOFTWARE, torch=replace(TORCH, threads=1))
    assert "1 of 80 cores" in judge(recorded("ice_lake"), software=software)["threads"].text


def test_a_torch_that_cannot_be_imported_is_a_warning(recorded: Recorded) -> None:
    software = replace(SOFTWARE, torch=None, torch_error="libtorch_cpu.so: cannot open shared object file")
    assert "libtorch_cpu.so" in judge(recorded("ice_lake"), software=software)["torch"].text


def test_a_torch_limited_to_older_instructions_is_a_warning(recorded: Recorded) -> None:
    software = replace(SOFTWARE, torch=replace(TORCH, capability="DEFAULT"))
    assert "AVX512" in judge(recorded("ice_lake"), software=software)["torch"].text


def test_unused_bf16_units_are_a_warning(recorded: Recorded) -> None:
    found = judge(recorded("genoa"), rates=RATES)["precision"]
    assert found.level == "warning"
    assert "bf16 90, fp32 4,000" in found.text
    assert "bf16 0.3, fp32 4,000" in judge(recorded("genoa"), rates=replace(RATES, bf16_all=0.3))["precision"].text
    fast = judge(recorded("genoa"), rates=replace(RATES, bf16_all=9000.0))["precision"]
    assert (fast.level, fast.action) == ("good", "Use bf16.")


@pytest.mark.parametrize(
    ("kernel", "units"),
    [
        ("brg_matmul:avx10_1_512_amx", "AMX-BF16"),
        ("brg_matmul:avx512_core_amx", "AMX-BF16"),
        ("brg_matmul:avx512_core_bf16", "AVX512-BF16"),
        ("brg_matmul:avx10_1_512", "AVX512-BF16"),
        ("brg_matmul:avx2_vnni_2", None),
        ("gemm:jit:bf16", None),
        ("ref:any", None),
        (None, None),
    ],
)
def test_units_are_named_as_onednn_says(kernel: str | None, units: str | None, recorded: Recorded) -> None:
    assert onednn.units_of(kernel) == units
    software = replace(SOFTWARE, torch=replace(TORCH, bf16_kernel=kernel))
    found = judge(recorded("sapphire_rapids_2"), software=software)["precision"].text
    assert f"itself ({units or 'AMX-BF16'})" in found  # without an answer, what the flags say


def step(fp32: float, bf16: float) -> TrainingStep:
    return TrainingStep(fp32, bf16, 384, 2, 1536, 7, "0.1.0", "2026-01-01T00:00:00Z", False)


SLOW_PRODUCTS, FAST_PRODUCTS = 3.0, 9000.0


@pytest.mark.parametrize(
    ("name", "bf16_all", "fp32", "bf16", "level", "line", "action"),
    [
        # no bf16 units
        ("ice_lake", SLOW_PRODUCTS, 0.2, 0.198, "good", "fp32 and bf16 train equally fast on this machine",
         "Use fp32, or bf16 where memory is short."),
        ("ice_lake", SLOW_PRODUCTS, 0.216, 0.2, "good", "bf16 trains 1.08 times as fast as fp32 on this machine",
         "Use fp32, or bf16 where memory is short."),
        ("ice_lake", SLOW_PRODUCTS, 0.2, 0.3, "good", "fp32 trains 1.50 times as fast as bf16 on this machine", "Use fp32."),
        ("ice_lake", SLOW_PRODUCTS, 0.3, 0.2, "good", "bf16 trains 1.50 times as fast as fp32 on this machine", "Use bf16."),
        # AVX512-BF16
        ("genoa", FAST_PRODUCTS, 0.3, 0.2, "good", "bf16 trains 1.50 times as fast as fp32 on this machine", "Use bf16."),
        ("genoa", FAST_PRODUCTS, 0.22, 0.2, "advice", "bf16 trains 1.10 times as fast as fp32 on this machine", "Use fp32."),
        ("genoa", FAST_PRODUCTS, 0.2, 0.25, "advice", "fp32 trains 1.25 times as fast as bf16 on this machine", "Use fp32."),
        ("genoa", SLOW_PRODUCTS, 0.2, 0.25, "warning", "fp32 trains 1.25 times as fast as bf16 on this machine",
         "Use fp32, or a newer torch."),
        # AMX
        ("sapphire_rapids_4", FAST_PRODUCTS, 0.084, 0.03, "good", "bf16 trains 2.80 times as fast as fp32 on this machine",
         "Use bf16."),
    ],
)  # fmt: skip
def test_the_precision_verdict_agrees_with_the_measured_step(
    name: str, bf16_all: float, fp32: float, bf16: float, level: str, line: str, action: str, recorded: Recorded
) -> None:
    found = judge(recorded(name), rates=replace(RATES, bf16_all=bf16_all, step=step(fp32, bf16)))["precision"]
    assert (found.level, found.action) == (level, action)
    figures = f"(measured step: fp32 {1000 * fp32:.0f} ms, bf16 {1000 * bf16:.0f} ms)"
    assert found.text.startswith(f"{line} {figures}. ")
    units = recorded(name).isa.bf16_units
    assert (units or "no bf16 units") in found.text


def test_a_step_measured_beside_other_programs_says_so(recorded: Recorded) -> None:
    found = judge(
        recorded("genoa"), rates=replace(RATES, bf16_all=9000.0, step=replace(step(0.3, 0.2), disturbed=True))
    )
    assert "(measured step while other programs ran: fp32 300 ms, bf16 200 ms)" in found["precision"].text


def test_load_and_stolen_time_are_warnings(recorded: Recorded) -> None:
    found = judge(recorded("ice_lake"), load=Load(busy=90.0, stolen=30.0, cpus=160))
    assert "90.0 of 160" in found["load"].text
    assert "30.0 of 160" in found["stolen time"].text


def test_load_is_the_difference_of_two_readings() -> None:
    #         user nice system idle iowait irq softirq steal
    first = ((100, 0, 50, 1000, 10, 0, 0, 0), 4)
    second = ((130, 0, 60, 1040, 10, 0, 0, 20), 4)
    found = between(first, second)
    assert found == Load(busy=4 * 40 / 100, stolen=4 * 20 / 100, cpus=4)
    assert between(first, first) is None


def test_a_crashing_debug_setting_is_a_warning_for_that_version_of_torch(recorded: Recorded) -> None:
    environment = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    machine = recorded("ice_lake")
    assert "environment" in judge(machine, software=SOFTWARE, environment=environment)
    other = replace(SOFTWARE, versions={"torch": "2.12.1"})
    assert "environment" not in judge(machine, software=other, environment=environment)


@pytest.mark.parametrize(
    ("versions", "install"),
    [
        ({"intel_extension_for_pytorch": "2.8.0", "torch": "2.13.0+cpu"}, "pip uninstall intel_extension_for_pytorch"),
        ({"oneccl_bind_pt": "2.8.0+cpu", "torch": "2.13.0"}, "pip uninstall oneccl_bind_pt"),
        ({"impi-rt": "2021.19.0"}, "pip install impi-rt==2021.18.1"),
        ({"oneccl": "2022.2.0"}, "pip install oneccl-devel==2021.13.1"),
        ({"accelerate": "0.34.2"}, "pip install 'accelerate>=1.3.0,<2'"),
        ({"transformers": "4.56.2"}, "pip install 'transformers>=4.57.1,<6'"),
        ({"transformers": "6.0.0"}, "pip install 'transformers>=4.57.1,<6'"),
        ({"torch": "2.12.1"}, "pip install 'torch>=2.13.0,<3'"),
    ],
)
def test_versions_that_clash_say_what_to_install(versions: dict[str, str], install: str, recorded: Recorded) -> None:
    found = judge(recorded("ice_lake"), software=replace(SOFTWARE, versions=versions))["versions"]
    assert found.action == install
    assert all(version in found.text for version in versions.values())


def test_compatible_versions_give_no_verdict() -> None:
    good = {
        "torch": "2.13.0+cpu",
        "impi-rt": "2021.18.1",
        "transformers": "5.22.2",
        "accelerate": "1.15.0",
        "numpy": "2.4.6",
    }
    assert find_bad_pairs(good) == []


def test_a_version_newer_than_the_newest_tested_is_marked() -> None:
    assert untested("transformers", "5.22.2") == untested("numpy", "99.0") == ""
    assert untested("torch", "2.99.0") == "newer than 2.13.0, the newest version tested"


def test_releases_are_compared_by_number() -> None:
    assert release("2.13.0+cpu") == (2, 13, 0)
    assert release("2.13.0") > release("2.8.1")
    assert release("unknown") == ()
