"""Architectures of transformers compute with Stoker what they compute without, and docs/models.md says how each of them runs.

`make test` examines those that a fixed seed draws from the page, `make test-all PART=zoo` all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from zoo.page import HOW, differences, draw, recorded, write

pytestmark = pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5, reason="the interface of transformers 5"
)
CLASSES = 3
"""How many classes of a drawn folder are examined; all of them in `make test-all`."""


@pytest.mark.parametrize("folder", draw(folder for folder, _ in recorded()))
def test_architecture_computes_the_same_as_stock(folder: str) -> None:
    from zoo.examine import FAILED, examine

    cases = examine(folder, CLASSES)
    assert [(case.name, case.why, case.calls) for case in cases if case.outcome in FAILED] == []
    page = recorded()
    for case in cases:
        if case.outcome != "not built":
            assert page[folder, case.name] == HOW[case.outcome], "write docs/models.md again: tests/zoo/run.py --page"


@pytest.fixture
def replaced_attention() -> Iterator[Any]:
    """A function that puts another one in the place of Stoker's attention."""
    from stoker.model import attention_interface

    yield lambda function: transformers.AttentionInterface.register("stoker", function)
    attention_interface.register()


def _granite() -> Any:
    from zoo.examine import examine_class

    return examine_class("granite", transformers.GraniteConfig, transformers.GraniteModel)


def test_zoo_notices_attention_that_sees_the_future(replaced_attention: Any) -> None:
    from stoker.model.attention_interface import stoker_attention

    def sees_all(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        return stoker_attention(module, query, key, value, None, **{**kwargs, "is_causal": False})

    replaced_attention(sees_all)
    case = _granite()
    assert case.outcome == "wrong"
    assert "attention, right" in case.calls


def test_zoo_notices_a_crash(replaced_attention: Any) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("attention fails")

    replaced_attention(fails)
    case = _granite()
    assert case.outcome == "crash"
    assert "attention fails" in case.why


def test_a_folder_that_takes_too_long_is_one_failure() -> None:
    from zoo.run import examine_all, is_failure

    (cases,) = examine_all(["granite"], jobs=1, limit=0.01)
    assert [is_failure(case) for case in cases] == [True]


def test_a_model_that_needs_a_library_that_is_not_installed_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo import species
    from zoo.examine import examine

    class Placeholder(type):
        """As transformers' DummyObject: every attribute asks for the library."""

        def __getattribute__(cls, name: str) -> Any:
            if name.startswith("_"):
                return super().__getattribute__(name)
            raise ImportError("GraniteModel requires the abacus library")

        def __call__(cls, *args: Any) -> Any:
            return cls.config_class

    monkeypatch.setattr(species.transformers, "GraniteModel", Placeholder("GraniteModel", (), {}))
    (case,) = examine("granite", 1)
    assert (case.name, case.outcome) == ("GraniteModel", "not built")
    assert "requires the abacus library" in case.why


def test_a_model_that_keeps_the_graph_of_its_last_call_can_be_copied() -> None:
    from zoo.examine import _copy

    class Keeps(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept = super().forward(x)
            return self.kept

    model = Keeps(2, 2)
    model(torch.ones(1, 2))
    copied = _copy(model)
    assert torch.equal(copied.kept, model.kept)
    assert copied.weight is not model.weight


def test_a_run_can_be_given_the_experts_of_another_one() -> None:
    from zoo.choices import Forced, Recorded

    real = torch.tensor([[True, True, False], [True, False, False]])
    scores = torch.rand(6, 4)
    with Recorded([real]) as recorded:
        torch.topk(scores, 2)
        scores.view(2, 3, 4).max(dim=-1)
    others = (1 - scores).requires_grad_()
    for padded in (True, False):  # in either layout, and as often as the model runs
        rows = real.flatten() if padded else torch.arange(3)
        own = others if padded else others[real.flatten()]
        with Forced([real], recorded.choices) as forced:
            values, chosen = torch.topk(own, 2, dim=-1)
            best = own.max(-1).indices
            torch.topk(torch.rand(5, 4), 2)  # not of these tokens
        assert torch.equal(chosen[rows], scores[real.flatten()].topk(2).indices)
        assert torch.equal(best[rows], scores[real.flatten()].argmax(-1))
        assert torch.equal(values, own.gather(1, chosen))
        assert values.requires_grad
        assert (forced.total, forced.different) == (9, 9)
        if padded:
            assert torch.equal(chosen[~rows], others[~rows].topk(2).indices)


@pytest.mark.parametrize(("tokens", "failed"), [(3, False), (72, True)])
def test_zoo_forgives_other_experts_for_single_tokens_only(tokens: int, failed: bool) -> None:
    """As rounding may choose them; a router that is wrong chooses others for most tokens."""
    from zoo.examine import Case, References, Specimen, Trial, _build, _quiet

    def prefer_the_worst(module: Any, inputs: Any) -> Any:
        return torch.cat([-inputs[0].flatten(0, -2)[:tokens], inputs[0].flatten(0, -2)[tokens:]])

    with _quiet():
        specimen = _build(transformers.MixtralConfig, transformers.MixtralModel)
        assert isinstance(specimen, Specimen)
        for layer in specimen.stock.layers:  # all chosen experts count alike, so that only the choice matters
            layer.mlp.gate.register_forward_hook(lambda _, args, out: (out[0], torch.full_like(out[1], 0.5), out[2]))
        model = copy.deepcopy(specimen.stock)
        for layer in model.layers:
            layer.mlp.gate.register_forward_pre_hook(prefer_the_worst)
        case = Case("mixtral", "MixtralModel", "")
        Trial(specimen, References(specimen), "model", case).call("bf16", model, "right", bf16=True)
    assert bool(case.calls) == failed
    assert bool(case.rerouted) != failed


@pytest.mark.parametrize("config", ["Qwen2Config", "Gemma3TextConfig", "Llama4TextConfig"])
def test_small_configurations_have_every_kind_of_layer_and_short_windows(config: str) -> None:
    from zoo.batches import LENGTHS
    from zoo.shrink import SCALES, shrink

    cls = getattr(transformers, config)
    small = shrink(cls, SCALES[0])
    kinds = {"full_attention", "chunked_attention" if config.startswith("Llama4") else "sliding_attention"}
    assert set(small.layer_types) == kinds
    assert len(small.layer_types) == small.num_hidden_layers
    window = small.attention_chunk_size if config.startswith("Llama4") else small.sliding_window
    assert 8 < window < max(LENGTHS)


def test_small_configurations_have_few_layers_in_every_stage() -> None:
    from zoo.shrink import SCALES, shrink

    assert set(shrink(transformers.Swin2SRConfig, SCALES[0]).depths) == {2}


def _case(name: str, outcome: str, why: str = "") -> dict[str, Any]:
    return {"folder": name.lower(), "name": name, "outcome": outcome, "why": why, "calls": {}}


def test_the_page_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    page = tmp_path / "models.md"
    line = "Falcon: this call runs as stock transformers does, because it counts a | b (logged once)"
    seen = "padding, fused layers: Vit is of no family in the table (BERT, GPT-2), and cannot run without padding otherwise"
    cases = [
        _case("Bert", "fused"), _case("Falcon", "leaf kernels", line), _case("Dinat", "not built", "no natten"),
        _case("Vit", "attention", f"{seen}: it takes no tokens"),
    ]  # fmt: skip
    write(cases, "5.0", page)
    assert recorded(page) == {("bert", "Bert"): "fused", ("falcon", "Falcon"): "stock", ("vit", "Vit"): "attention"}
    assert "| falcon | Falcon | stock | it counts a \\| b |" in page.read_text()
    assert "| vit | Vit | attention | it takes no tokens |" in page.read_text()
    assert differences(cases, page) == []
    assert differences([_case("Bert", "wrong"), *cases[1:]], page) == ["bert: Bert: fused, but it is wrong"]
