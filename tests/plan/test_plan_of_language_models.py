"""`stoker plan` for language models: sizes, what is trained and exchanged, and machines that are predicted from rates."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("peft", reason="needs the extra sft")

from stoker.cli import main
from stoker.errors import UserError
from stoker.hf.core_scaling import efficiency
from stoker.hf.step_cost import Speed
from stoker.plan.cost_model import NO_COLLECTIVES, Collectives, Network, Setup, predict
from stoker.plan.predicted_node import MachineRates, predict_node
from stoker.plan.subject import Subject, ready_last, usual_task
from tasks.language_models import save_tiny_llama

PARAMETERS = {
    "smollm2-135m": 134_515_008, "smollm2-360m": 361_821_120, "qwen2.5-0.5b": 494_032_768, "llama-3.2-1b": 1_235_814_400,
}  # fmt: skip
"""As their model cards count them."""
MACHINE = MachineRates(cores=2, flops=100e9, bytes=20e9)
RATES: Any = SimpleNamespace(threads=2, fp32_all=170.0, bandwidth_all=27.0)


@pytest.mark.parametrize("name", PARAMETERS)
def test_sizes_are_those_of_the_published_models(name: str) -> None:
    assert usual_task(name) == "sft"
    assert sum(one.numel() for one in Subject(name, "sft").build("meta").parameters()) == PARAMETERS[name]


def test_a_plan_with_adapters_prints_no_warning_of_a_library(tmp_path: Path) -> None:
    subject = Subject(str(save_tiny_llama(tmp_path / "llama")), "sft", 8, lora_r=2)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        subject.build()
    assert [str(one.message) for one in found if issubclass(one.category, FutureWarning)] == []


def test_only_adapters_are_trained_and_exchanged_with_lora() -> None:
    model = Subject("smollm2-135m", "sft", 200, lora_r=16).build("meta")
    # q and o, k and v, gate, up and down, each with rank 16 at both ends
    by_hand = 30 * 16 * (2 * (576 + 576) + 2 * (576 + 192) + 3 * (576 + 1536))
    assert by_hand == 4_884_480
    node = predict_node(Subject("smollm2-135m", "sft", 200, 16, 0.5), 8, MACHINE, NO_COLLECTIVES)
    assert node.parameters == by_hand == sum(one.numel() for one in model.parameters() if one.requires_grad)
    assert node.last == 0
    full = predict_node(Subject("smollm2-135m", "sft", 200, 0, 0.5), 8, MACHINE, NO_COLLECTIVES)
    assert full.parameters == 134_515_008
    assert full.last == pytest.approx(49152 * 576 / 134_515_008)
    # Gradients and two moments of all weights, instead of the adapters with theirs.
    assert full.memory == pytest.approx(node.memory + 12 * 134_515_008 - 16 * by_hand)
    assert node.step < full.step


def test_the_traffic_between_nodes_is_that_of_the_adapters() -> None:
    collectives = Collectives(rate=1e12, rate_bf16=1e12, cpu=0.0, cpu_bf16=0.0, apply=0.0)
    node = predict_node(Subject("smollm2-135m", "sft", 200, 16, 0.5), 8, MACHINE, collectives)
    found = predict(node, Network(1.0, 0.0), 2, Setup())
    wire = 4 * 4_884_480 / (0.94e9 / 8)
    # Less than a bucket: after the backward pass all is sent but DDP's first bucket, 1 MB, which is full after 3 of 40 parts.
    assert found.step == pytest.approx(node.step + wire * (1 - 3 / 40))


def test_products_of_a_predicted_step_are_as_counted_by_hand() -> None:
    """With infinite bandwidth and one long row of labels, only the products are left."""
    node = predict_node(Subject("smollm2-135m", "sft", 100, 0, 1.0), 1, MachineRates(1, 1.0, 1e30), NO_COLLECTIVES)
    layer = 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536
    layers, head, attention = 6 * 30 * layer * 100, 6 * 49152 * 576 * 100, 6 * 30 * 576 * 100**2
    assert node.step == pytest.approx(layers / 0.92 + head / 0.7 + attention / 0.54, rel=1e-6)
    assert node.tokens == 100


def test_a_larger_machine_has_the_rates_of_its_cores_up_to_those_of_a_socket() -> None:
    assert MachineRates.of(RATES, 2) == MachineRates(2, 170e9, 27e9)
    assert MachineRates.of(RATES, 16) == MachineRates(16, 8 * 170e9, 200e9)
    assert MachineRates.of(RATES, 64, gflops=4000, bandwidth=300) == MachineRates(64, 4e12, 300e9)
    with_units = MachineRates.of(RATES, 64, gflops=4000, bandwidth=300, bf16_gflops=16000)
    assert with_units == MachineRates(64, 4e12, 300e9, 16e12)
    assert with_units.speed(4) == Speed(flops=4e12, bytes=75e9, cores=16, fp32=1e12)
    assert MachineRates(64, 4e12, 300e9).speed(2) == Speed(flops=2e12, bytes=150e9, cores=32)
    assert "4,000 GFLOP/s in fp32, 16,000 in bf16, 300 GB/s" in with_units.summary()


def test_processes_share_a_machine_and_sum_their_gradients_in_its_memory() -> None:
    subject, machine = Subject("smollm2-135m", "sft", 200, 0, 0.5), MachineRates(2, 100e9, 20e9)
    one, two = (predict_node(subject, 8, machine, NO_COLLECTIVES, processes) for processes in (1, 2))
    assert two.processes == 2
    assert two.memory > 1.5 * one.memory
    # Each process has one core, which is always busy, and all of the host's work.
    exchange = 12 * 134_515_008 * 2 / 20e9
    assert two.step > exchange + efficiency(2, 1600) * (one.step - one.host) + two.host
    with pytest.raises(UserError, match="at most the number of cores"):
        predict_node(subject, 8, machine, NO_COLLECTIVES, 3)


def test_the_best_number_of_processes_is_planned_with() -> None:
    subject, machine = Subject("smollm2-135m", "sft", 200, 0, 0.5), MachineRates(112, 7e12, 5e11)
    best = predict_node(subject, 32, machine, NO_COLLECTIVES)
    each = {count: predict_node(subject, 32, machine, NO_COLLECTIVES, count) for count in (2, 4, 8, 16)}
    assert best == each[best.processes]
    # Twice the processes need twice the memory, so they must be worth it.
    assert best.step <= 1.05 * min(one.step for one in each.values())
    assert all(best.step < one.step for count, one in each.items() if count < best.processes)
    assert predict_node(subject, 8, MACHINE, NO_COLLECTIVES).processes == 1  # two cores
    # A process has at most 64 cores, and at least one row.
    assert predict_node(subject, 1, machine, NO_COLLECTIVES).processes == 1
    assert predict_node(subject, 2, machine, NO_COLLECTIVES).processes == 2


def test_cores_are_worth_less_the_more_there_are() -> None:
    subject = Subject("bert-base", "qa", 160)
    few, many = (
        predict_node(subject, 12, MachineRates(cores, cores * 80e9, 2e11), NO_COLLECTIVES, 1) for cores in (2, 56)
    )
    assert few.step / many.step < 28 * efficiency(56, 12 * 160) / efficiency(2, 12 * 160)
    assert few.host < many.host  # more threads to wake
    assert many.host < many.step


def test_labels_are_the_end_of_each_row() -> None:
    subject = Subject("smollm2-135m", "sft", 100, 16, 0.25)
    config = SimpleNamespace(max_position_embeddings=8192, model_type="llama", vocab_size=49152)
    rows = subject.rows(4, 0, config)
    lengths = rows["attention_mask"].sum(1)
    labelled = (rows["labels"] != -100).sum(1)
    assert (labelled.float() / lengths).tolist() == pytest.approx([0.25] * 4, abs=0.02)
    assert bool((rows["labels"][0, int(lengths[0]) - 1] == rows["input_ids"][0, int(lengths[0]) - 1]).all())
    assert bool((rows["labels"][rows["attention_mask"] == 0] == -100).all())


def test_machines_are_compared_without_measuring_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        "--model",
        "smollm2-135m",
        "--batch",
        "16",
        "--length",
        "200",
        "--rows",
        "10000",
        "--cores",
        "2,16,64",
    ]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "LoRA with rank 16: 4.88 M trained parameters, 16 rows of about 200 tokens" in shown
    assert [line.split()[0] for line in shown.splitlines()[-4:]] == ["cores", "2", "16", "64"]
    assert "host" in shown.splitlines()[-4].split()
    assert main([*words, "--full", "--price", "1.5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["asked"]["lora_r"] == 0
    small, _, large = found["machines"]
    assert small["parameters"] == 134_515_008
    assert small["epoch"] == pytest.approx(625 * small["step"])
    assert large["step"] < small["step"] / 10
    assert 0 < large["host"] < large["step"]
    assert small["cost"] == pytest.approx(1.5 * small["epoch"] / 3600)


def test_a_predicted_machine_is_planned_with_on_several_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        "--model",
        "qwen2.5-0.5b",
        "--cores",
        "16",
        "--gflops",
        "1200",
        "--bandwidth",
        "100",
        "--nodes",
        "1,2",
    ]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["nodes"] for row in found["nodes"]] == [1, 2]
    assert found["node"]["cores"] == 16
    assert found["nodes"][1]["tokens_per_second"] > 1.5 * found["nodes"][0]["tokens_per_second"]


@pytest.mark.part("tasks")
def test_a_language_model_in_a_folder_is_measured_with_adapters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny_llama(tmp_path / "llama")
    words = ["plan", "--model", str(folder), "--batch", "4", "--length", "16", "--nodes", "1,2", "--processes", "1"]
    assert main([*words, "--lora_r", "2", "--json"]) == 0
    adapters = json.loads(capsys.readouterr().out)["node"]
    assert main([*words, "--full", "--json"]) == 0
    full = json.loads(capsys.readouterr().out)["node"]
    assert adapters["parameters"] == 2 * 2 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64))
    assert full["parameters"] > adapters["parameters"]
    assert full["tokens"] == adapters["tokens"] == 64
    assert full["memory"] > 1e8
    assert usual_task(str(folder)) == "sft"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--full"], "--full and --lora_r are for language models (--task sft), and the task is qa"),
        (["--model", "smollm2-135m", "--full", "--lora_r", "8"], "give only one of them"),
        (["--model", "smollm2-135m", "--labelled", "2"], "it must be above 0 and at most 1"),
        (["--cores", "many"], "is not a number or a list"),
        (["--cores", "0"], "each number must be from 1 to 4096"),
        (["--cores", "2,4", "--nodes", "1..4"], "leave out --nodes"),
        (["--cores", "2,4", "--gflops", "100"], "needs one number of --cores"),
        (["--gflops", "100"], "whose number of --cores is given"),
        (["--bf16_gflops", "100"], "whose number of --cores is given"),
        (["--cores", "2", "--step", "1", "--parameters", "1e6"], "give only one of them"),
        (["--cores", "2", "--processes", "3"], "at most the number of cores (2)"),
        (["--model", "smollm2-135m", "--length", "9000"], "rows of at most 8192 tokens"),
    ],
)  # fmt: skip
def test_invalid_options_are_reported_in_one_sentence(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    assert message in capsys.readouterr().err


def test_frozen_embeddings_are_not_waited_for() -> None:
    assert ready_last(Subject("smollm2-135m", "sft", 100, 4).build("meta")) == 0.0
    assert ready_last(Subject("bert-base", "qa").build("meta")) == pytest.approx(0.219, abs=0.01)
