"""The plan's formula is as documented, its advice changes training as little as possible, and errors are one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BertConfig, BertForQuestionAnswering

from stoker.cli import main
from stoker.cli.plan import node_counts
from stoker.errors import UserError
from stoker.hf.step_cost import StepCost
from stoker.machine.processes import REFERENCE
from stoker.plan import link_rates, predicted_node
from stoker.plan.advice import Job, accumulation, plan, table
from stoker.plan.cost_model import PARTS, Collectives, Network, Node, Setup, predict
from stoker.plan.gradient_times import GradientTimes
from stoker.plan.subject import Subject

FAST = Collectives(rate=2e9, rate_bf16=2e9, cpu=0.4e-9, cpu_bf16=0.4e-9, apply=0.5e-9)
NODE = Node(step=2.0, processes=2, parameters=109_000_000, collectives=FAST, cores=16)


@pytest.mark.parametrize(("text", "gbit"), [("10gbit", 10), ("500mbit", 0.5), ("2.5 Gbit/s", 2.5), ("1tbit", 1000)])
def test_networks_are_parsed_by_their_rate(text: str, gbit: float) -> None:
    assert Network.parse(text).gbit == gbit


@pytest.mark.parametrize("text", ["10", "fast", "0gbit", "-1gbit", "10gbyte"])
def test_an_invalid_rate_is_rejected(text: str) -> None:
    with pytest.raises(UserError, match="is not a rate"):
        Network.parse(text)


def test_the_model_of_processes_per_machine_has_the_cost_of_a_step_of_bert() -> None:
    with torch.device("meta"):
        cost = StepCost.of(BertForQuestionAnswering(BertConfig()))
    assert cost.weights * 6 / 0.92 == pytest.approx(REFERENCE.flops, rel=0.02)
    assert cost.moved_per_token == pytest.approx(REFERENCE.moved_per_token, rel=0.02)
    assert cost.moved_per_batch + cost.moved_per_update == pytest.approx(REFERENCE.moved_per_process, rel=0.02)
    assert predicted_node.EXCHANGED * cost.trained == pytest.approx(REFERENCE.exchanged, rel=0.02)


def test_a_local_sgd_step_is_the_nodes_step_and_a_share_of_one_exchange() -> None:
    # 2 nodes: each sends all gradients once; 109 M x 4 bytes at 94% of 1 Gbit/s, and the latency of a handful of messages.
    exchange = 109e6 * 4 / (0.94e9 / 8) + 2 * 4.36 * 100e-6
    apply = 109e6 * 4 * 0.5e-9 / 16 * 2
    found = predict(NODE, Network.parse("1gbit"), 2, Setup(local_sgd=8))
    assert found.step == pytest.approx(2.0 + (exchange + apply) / 8, rel=1e-6)


def test_waiting_overlaps_with_the_backward_pass_except_for_what_is_complete_last() -> None:
    network = Network.parse("10gbit", latency=0.0)
    traffic = 109e6 * 4
    busy = traffic * 0.4e-9 / 16
    carry = traffic / (0.94e10 / 8)
    # A quarter of the gradients is complete after each quarter of the backward pass: only the last is not hidden.
    node = replace(NODE, ready=(0.25, 0.5, 0.75, 1.0))
    assert carry / 4 < 0.6 * NODE.step / 4
    assert predict(node, network, 2, Setup()).step == pytest.approx(2.0 + busy + carry / 4)
    # Nothing is complete before the end: nothing is hidden.
    node = replace(NODE, ready=(0.0, 0.0, 0.0, 1.0))
    assert predict(node, network, 2, Setup()).step == pytest.approx(2.0 + busy + carry)
    # Where the network is the limit, the exchange goes on from the first full bucket to its end.
    network = Network.parse("1gbit", latency=0.0)
    node = replace(NODE, ready=(0.25, 0.5, 0.75, 1.0))
    backward = 0.6 * NODE.step + busy
    assert predict(node, network, 2, Setup()).step == pytest.approx(2.0 + busy + 10 * carry - 0.75 * backward)


def test_large_buckets_begin_later_and_small_ones_leave_less_for_the_end() -> None:
    node = replace(NODE, ready=tuple((part + 1) / 40 for part in range(40)))
    network = Network.parse("2gbit", latency=0.0)
    steps = [predict(node, network, 2, Setup(bucket_mb=size)).step for size in (25, 100, 1000)]
    assert steps == sorted(steps)
    assert steps[0] < steps[2]


def test_rounding_gradients_to_bf16_takes_time_of_the_cores() -> None:
    network = Network.parse("10gbit", latency=0.0)
    slow = replace(NODE, collectives=replace(FAST, cast=0.5e-9))
    extra = (
        predict(slow, network, 2, Setup(compression="bf16")).step
        - predict(NODE, network, 2, Setup(compression="bf16")).step
    )
    assert 0 < extra <= 109e6 * 4 * 0.5e-9 / 16 * 2 + 1e-9
    assert predict(slow, network, 2, Setup()).step == predict(NODE, network, 2, Setup()).step


def test_a_part_of_a_core_cannot_carry_more_than_it_has_time_for() -> None:
    network = Network.parse("100gbit", latency=0.0)
    whole, part = (predict(replace(NODE, cores=cores), network, 2, Setup()).step for cores in (1, 0.25))
    assert whole < part


def test_the_times_of_gradients_are_those_of_the_backward_pass() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(4)), torch.nn.Embedding(2, 8))
    times = GradientTimes(model)
    loss = model[3](model[2](model[1](model[0](torch.ones(2, 8))))).sum()
    times.begin()
    loss.backward()
    times.end()
    assert times.total == 4 * 64 + 16
    assert len(times.ready) == PARTS
    assert list(times.ready) == sorted(times.ready)
    assert times.ready[-1] == pytest.approx(1.0)
    assert max(times.ready[:-1]) <= 256 / 272 + 1e-9  # the embedding has no gradient: sent at the end


@given(
    st.integers(1, 512), st.sampled_from(["100mbit", "1gbit", "10gbit", "100gbit"]), st.booleans(), st.integers(0, 64)
)
def test_communication_never_makes_a_step_shorter(nodes: int, rate: str, small: bool, every: int) -> None:
    setup = Setup(compression="bf16" if small else "none", local_sgd=every)
    found = predict(NODE, Network.parse(rate), nodes, setup)
    assert found.step >= NODE.step
    assert 0 < found.efficiency <= 1
    faster = predict(NODE, Network.parse("400gbit", latency=0.0), nodes, setup)
    assert faster.step <= found.step + 1e-9


def test_advice_changes_the_mathematics_no_more_than_needed() -> None:
    job = Job(rows=88_000, batch=12)

    def advised(rate: str) -> Setup:
        return plan(NODE, Network.parse(rate), [4], job)[0].advised.setup

    assert advised("100gbit").label == "plain DDP"
    assert advised("100mbit").local_sgd > 0
    assert advised("100mbit").local_sgd > advised("1gbit").local_sgd > 0


def test_accumulation_is_offered_instead_of_local_sgd_where_it_suffices() -> None:
    job = Job(rows=88_000, batch=12)
    slow, hopeless = (plan(NODE, Network.parse(rate), [4], job)[0] for rate in ("500mbit", "1mbit"))
    assert slow.advised.setup.local_sgd
    found = accumulation(NODE, slow)
    assert found is not None
    count, prediction = found
    assert prediction.efficiency >= 0.9
    assert not prediction.setup.local_sgd
    assert count * prediction.step == pytest.approx((count - 1) * NODE.step + predict(NODE, Network.parse("500mbit"), 4,
                                                                                      prediction.setup).step)  # fmt: skip
    assert accumulation(NODE, hopeless) is None


def test_cost_is_the_time_of_all_nodes() -> None:
    row = plan(NODE, Network.parse("100gbit"), [4], Job(rows=48_000, batch=12, price=3.0))[0]
    assert row.epoch == pytest.approx(1000 * row.advised.step)
    assert row.cost == pytest.approx(4 * row.epoch / 3600 * 3.0)
    assert f"{row.cost:.2f}" in table([row], price=True)


def test_node_counts_double_up_to_the_last() -> None:
    assert node_counts("1..64") == [1, 2, 4, 8, 16, 32, 64]
    assert node_counts("3..20") == [3, 6, 12, 20]
    assert node_counts("5..5") == [5]
    assert node_counts("4,1,2") == [1, 2, 4]
    for wrong in ("0..4", "8..2", "many", "1,,2", ""):
        with pytest.raises(UserError):
            node_counts(wrong)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--network", "fast"], "is not a rate"),
        (["--nodes", "0..3"], "--nodes"),
        (["--step", "2"], "--step and --parameters must be given together"),
        (["--out", "plan.gif"], ".svg, .png or .pdf"),
        (["--out", "/nowhere/plan.svg"], "there is no folder"),
        (["--batch", "0"], "whole number above 0"),
        (["--price", "-1"], "'-1' is not a number of 0 or more"),
        (["--latency", "nan"], "'nan' is not a number of 0 or more"),
        (["--step", "2", "--parameters", "inf"], "'inf' is not a number of 0 or more"),
        (["--length", "600"], "rows of at most 512 tokens"),
        (["--model", "/nowhere/model"], "--model '/nowhere/model'"),
    ],
)
def test_invalid_options_are_reported_in_one_sentence(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown


def test_another_machine_can_be_planned_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.svg"
    words = ["--nodes", "1..8", "--network", "10gbit", "--step", "1.9", "--parameters", "109e6", "--price", "0.5"]
    assert main(["plan", *words, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines() if line.lstrip()[:1].isdigit()] == ["1", "2", "4", "8"]
    assert "advice:" in shown
    assert "epoch: 88,524 rows, as many as SQuAD has; --rows sets the number" in shown
    assert "</svg>" in out.read_text()


def test_the_plan_is_available_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--nodes",
        "1,4",
        "--network",
        "1gbit",
        "--step",
        "1.9",
        "--parameters",
        "109e6",
        "--price",
        "0.5",
        "--json",
    ]
    assert main(["plan", *words]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [row["nodes"] for row in shown["nodes"]] == [1, 4]
    assert "--local_sgd" in shown["nodes"][1]["advised"]["flags"]
    assert shown["nodes"][0]["advised"]["flags"] == ""
    assert shown["nodes"][1]["cost"] > 0
    assert shown["node"]["step"] == 1.9


def test_an_epoch_takes_whole_steps() -> None:
    row = plan(NODE, Network.parse("100gbit"), [64], Job(rows=10, batch=12))[0]
    assert row.epoch == pytest.approx(row.advised.step)


@pytest.mark.parametrize("length", [1, 160, 400, 512])
def test_rows_fit_the_model_and_keep_their_mean(length: int) -> None:
    config = SimpleNamespace(max_position_embeddings=512, model_type="bert", vocab_size=100)
    rows = Subject("bert-base", "qa", length).rows(6, 0, config)
    lengths = rows["attention_mask"].sum(1)
    assert lengths.max() <= 512
    assert float(lengths.float().mean()) == pytest.approx(length, abs=1)
    assert rows["input_ids"].max() < 100


def test_smt_siblings_are_not_counted_as_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = (SimpleNamespace(cpus=(0, 2)), SimpleNamespace(cpus=(1, 3)))
    monkeypatch.setattr(link_rates, "this_machine", lambda: SimpleNamespace(usable_cores=cores))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert link_rates.usable_cores() == [0, 1]


def test_the_reason_of_a_failed_measurement_is_reported() -> None:
    assert "memory ran out" in link_rates._failure_reason(-9, "")
    assert link_rates._failure_reason(1, "Traceback\nstoker.errors.UserError: --model 'x': no") == "--model 'x': no"
    assert link_rates._failure_reason(1, "IndexError: 7") == "the measurement failed: IndexError: 7"


def test_this_machine_is_measured_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "bert-tiny", "--batch", "4", "--length", "16", "--nodes", "1,2", "--processes", "1"]
    assert main(words) == 0
    first = capsys.readouterr()
    assert "measuring a step of bert-tiny, 4 rows, 1 process" in first.err
    assert main(words) == 0
    again = capsys.readouterr()
    assert "measuring" not in again.err
    assert again.out == first.out
