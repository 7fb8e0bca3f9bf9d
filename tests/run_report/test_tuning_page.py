"""The page of `stoker tune`: all trials with their curves, escaped, and readable in a browser on a phone and on a wide screen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attack.run_logs import MARKUP
from rig.chromium import browser
from stoker.run_report.log import PRUNED, RunLog
from stoker.run_report.tuning import TrialRow, Tuning, short_values
from stoker.run_report.tuning_page import render_tuning

RANK = "lora_r"
DECAYS = (0.1, 0.1001, 0.3, 0.7, 1.0)


def trial(folder: Path, number: int, state: str, score: float | None, reason: str = "") -> TrialRow:
    place = folder / f"trial-{number + 1:03d}"
    if state != "queued":
        log = RunLog(place)
        log.write("start", task="sft", model="org/llm", command="stoker train sft")
        for step in range(1, 15):
            log.write("step", step=step, loss=2 / step + 0.01 * number, tokens_per_second=900.0 + number)
        log.write("end", reason={"finished": "finished", "pruned": PRUNED}.get(state, "an error"), step=14)
    curve = [] if score is None else [(25.0, score + 0.3), (50.0, score)][: 1 if state == "pruned" else 2]
    values = {"learning_rate": 1e-4 * (number + 1), RANK: 4 << number % 3, "optim": ("adamw_torch", MARKUP)[number % 2]}
    return TrialRow(number, place, state, values, score, curve, reason, given=number == 0)


def tuning(folder: Path, *, trials: int = 14, running: bool = False) -> Tuning:
    rows = [trial(folder, number, "finished", 0.5 + 0.01 * number) for number in range(trials - 4)]
    rows += [
        trial(folder, trials - 4, "pruned", 0.9),
        trial(folder, trials - 3, "diverged", None, "the loss is nan at step 3"),
        trial(folder, trials - 2, "killed", None),
        trial(folder, trials - 1, "queued", None),
    ]
    return Tuning(
        f"{MARKUP} sft", "eval_loss", True, [*rows[1:-4], rows[0], *rows[-4:]], trials - 2, running,
        [("learning_rate", "1e-5..1e-2:log", True), (RANK, "4|8|16", False), ("optim", f"adamw_torch|{MARKUP}", False)],
        "stoker train out/best_recipe.yaml", f"stoker train sft --learning_rate=0.0002 '{MARKUP}'", "stoker tune sft",
        {"learning_rate": 0.8, RANK: 0.2}, "0.1",
    )  # fmt: skip


def test_the_page_has_all_trials_the_best_command_and_escapes_every_text(tmp_path: Path) -> None:
    page = render_tuning(tuning(tmp_path))
    assert page.count('<span class="pill good">finished</span>') == 11, "the search, and ten trials"
    for state in ("diverged", "killed"):
        assert f'<span class="pill bad">{state}</span>' in page
    assert '<span class="pill idle">pruned</span>' in page
    assert '<span class="pill busy">queued</span>' in page
    assert "the loss is nan at step 3" in page
    assert "1 · as given" in page
    assert "0.9 (at 25%)" in page
    assert "<pre>stoker train out/best_recipe.yaml</pre>" in page
    assert "the lowest eval loss at the end of training" in page
    assert page.count("<figure>") == 7, "scores, losses, history, three options, importance"
    assert "eval loss of 11 trials" in page, "trials beyond the colours are drawn as well"
    for dangerous in ("<img", "<script", "#0a0b"):
        assert dangerous not in page


def test_axes_end_with_training_and_labels_do_not_overlap(tmp_path: Path) -> None:
    rows = [
        TrialRow(n, tmp_path / f"trial-{n}", "finished", {"lora_r": 4 << n, "decay": DECAYS[n]}, 0.5 + n,
                 [(50.0, 0.4), (100.0, 0.5 + n)])
        for n in range(5)
    ]  # fmt: skip
    space = [("lora_r", "4|8|16|32|64", False), ("decay", "0.1..1.0", False)]
    page = render_tuning(Tuning("bert: qa", "f1", False, rows, 5, False, space))
    scores, _, ranks, decays = re.findall(r"<svg[^>]*role.*?</svg>", page, re.S)
    assert "105" not in labels(scores)
    assert [one for one in labels(scores) if one in ("0", "25", "50", "75", "100")] == ["0", "25", "50", "75", "100"]
    assert [one for one in labels(ranks) if one in ("4", "8", "16", "32", "64")] == ["4", "8", "16", "32", "64"]
    assert "0.1001" not in labels(decays)


def labels(svg: str) -> list[str]:
    """The texts of a plot."""
    return [re.sub(r"<[^>]*>", "", one).strip() for one in re.findall(r"<text[^>]*>(.*?)</text>", svg, re.S)]


def test_a_search_without_results_has_a_page_too(tmp_path: Path) -> None:
    rows = [TrialRow(0, tmp_path / "trial-001", "running", {}, None)]
    page = render_tuning(Tuning("bert: qa", "f1", False, rows, 20, True, [("learning_rate", "1e-5..1e-4:log", True)]))
    assert '<span class="pill busy">running</span>0 of 20 trials done, by f1' in page
    assert "Nothing has been measured yet." in page
    assert "The best" not in page.replace("The best first", "")


def test_the_options_of_a_trial_are_named_as_people_call_them() -> None:
    values = {
        "learning_rate": 3.2e-05,
        "per_device_train_batch_size": 16,
        "num_train_epochs": 3,
        RANK: 8,
        "weight_decay": 0.1,
    }
    assert short_values(values) == "learning rate 3.2e-05, batch size 16, epochs 3, rank 8, weight decay 0.1"


@pytest.mark.part("docs")
@pytest.mark.browser
def test_the_page_fits_every_screen_and_breaks_no_policy(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(render_tuning(tuning(tmp_path)))
    with browser(tmp_path) as page:
        for width, dark in ((1200, False), (390, True)):
            page.show(width, 1400, dark=dark)
            page.open(path.as_uri())
            page.wait_for(f"document.readyState === 'complete' && innerWidth === {width}")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing to scroll sideways"
            assert page.evaluate("document.querySelectorAll('.runs tr').length") == 15
            assert page.evaluate("document.querySelectorAll('figure svg').length") == 7
            heights = "[...document.querySelectorAll('svg text')].map(one => one.getBoundingClientRect().height)"
            assert page.evaluate(f"{heights}.filter(one => one > 0 && one < 7).length") == 0
            swatch = page.evaluate("getComputedStyle(document.querySelector('.swatch line')).stroke")
            assert swatch == ("rgb(108, 178, 255)" if dark else "rgb(11, 107, 203)"), "the best has the first colour"
        page.screenshot(tmp_path / "page.png")
        assert page.messages == [], "no error, and nothing that the policy refused"
