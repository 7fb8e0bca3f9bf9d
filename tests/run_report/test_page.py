"""The report is one file that loads nothing, shows what the log says, and looks right in a browser, large and small."""

from __future__ import annotations

import math
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rig.chromium import FLAGS, executable
from stoker.cli import main
from stoker.errors import UserError
from stoker.run_report.log import RunLog
from stoker.run_report.page import write_report


def log_a_run(folder: Path, *, finished: bool = True) -> None:
    log = RunLog(folder)
    log.write("start", task="qa", model="org/bert-tiny", command="stoker train qa --x '<b>'", versions={"stoker": "0.1"},
              machine={"cpu": "Some CPU", "cores": 2, "threads": 2, "memory": 16e9, "gflops": 160.0, "system": "Linux"},
              arguments={"learning_rate": 3e-5})  # fmt: skip
    log.write("model", name="/somewhere/model", type="BertForQuestionAnswering", parameters=22_000_000, steps=100)
    log.write("applied", parts=[["padding-free base model", "BertModel", 1]], left_alone=[["x", "<why>"]],
              settings={"precision": "fp32"})  # fmt: skip
    log.write("lengths", counts=[3, 9, 4], edges=[0, 50, 100, 150], mean=80.0, longest=149, rows=16, padded_to=384)
    for step in range(1, 101 if finished else 41):
        phases = {"forward": 0.3, "backward": 0.6, "optimizer": 0.05, "data": 0.01, "rest": 0.04}
        log.write("step", step=step, loss=4 * math.exp(-step / 30) + 0.1, learning_rate=3e-4 * (1 - step / 100),
                  tokens_per_second=1400 + step % 7, padding_avoided=0.58, share_of_peak=0.7, phases=phases)  # fmt: skip
        if step % 20 == 0:
            log.write("evaluation", step=step, eval_f1=step * 0.8, eval_exact_match=step * 0.7)
    rows = [{"id": str(n), "question": "Who <script>alert(1)</script>?", "context": "It was Ada & Bo. " * 40, "answer": "Ada",
             "begin": 7, "end": 10, "expected": ["Ada"], "right": n % 2 == 0, "probability": 0.9} for n in range(6)]  # fmt: skip
    rows.append({"context": "Ada <b> wrote to Bo", "right": False, "expected": ["Bo (PER)"],
                 "marks": [{"begin": 0, "end": 3, "label": "<PER>", "right": True}, {"begin": 4, "end": 7, "right": False},
                           {"begin": 5, "end": 9, "right": True}]})  # fmt: skip
    log.write("examples", rows=rows)
    log.write("tables", tables=[{"title": "By <type>", "columns": ["", "F1"], "rows": [["PER", "0.5"]]}])
    log.write("speed", sides={"stock": [2.0, 2.1, 1.9], "Stoker": [0.5, 0.6, 0.5]}, ratio=4.0, note="Medians.")
    if finished:
        log.write("trained", step=100, train_runtime=301.0)
        log.write("end", reason="finished", step=100)


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attributes:
            if name in {"src", "href", "xlink:href"} and value:
                self.links.append(value)
            if name == "id" and value:
                self.ids.append(value)


def test_the_page_is_self_contained_and_escapes_its_content(tmp_path: Path) -> None:
    log_a_run(tmp_path)
    text = write_report(tmp_path).read_text()
    page = Page()
    page.feed(text)
    assert page.tags.count("svg") == 6
    assert "script" not in page.tags
    assert all(link.startswith(("#", "data:")) for link in page.links), page.links
    assert not re.search(r"url\((?!#)", text)
    assert len(page.ids) == len(set(page.ids)), "ids of one plot do not meet those of another"
    for shown in (
        "80.0",
        "4.0x",
        "padding avoided",
        "Some CPU",
        "padding-free base model",
        "&lt;why&gt;",
        "--x &#39;&lt;b&gt;",
        '<mark class="right">Ada<small>&lt;PER&gt;</small></mark> <mark class="wrong">&lt;b&gt;</mark> wrote to Bo',
        "<h2>By &lt;type&gt;</h2>",
    ):
        assert shown in text
    assert "#0a0b" not in text, "every stand-in colour became a variable"


def test_the_page_of_a_killed_run_says_that_it_did_not_finish(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log_a_run(tmp_path, finished=False)
    with open(tmp_path / "run.jsonl", "a") as file:
        file.write('{"kind": "step", "st')
    assert main(["report", str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    assert "not finished" in text
    assert "last seen at step 40" in text
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")


def test_an_almost_empty_log_gives_a_page(tmp_path: Path) -> None:
    RunLog(tmp_path).write("start")
    assert "Nothing has been logged yet" in write_report(tmp_path).read_text()


def test_a_page_that_cannot_be_written_is_reported_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_text('{"kind": "start"}\n')
    with pytest.raises(UserError, match=r"none/page\.html cannot be written: there is no folder"):
        write_report(tmp_path, tmp_path / "none" / "page.html")


def test_a_folder_without_a_log_is_reported_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "has no run.jsonl" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err
    (tmp_path / "run.jsonl").touch()
    assert main(["report", str(tmp_path)]) == 2
    assert "is still empty; generate the page when the run has begun" in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["run.jsonl"]


def browse(page: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [executable(), *FLAGS, "--enable-logging=stderr",
         f"--user-data-dir={folder / 'profile'}", *options, page.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip


MEASURE = """<script>
addEventListener("load", () => {
  const small = [...document.querySelectorAll("svg text")]
    .map(text => text.getBoundingClientRect().height).filter(height => height > 0 && height < 7).length;
  const wide = [...document.querySelectorAll("main *")]
    .filter(one => !one.closest("svg") && one.getBoundingClientRect().right > innerWidth + 1).length;
  document.title = `width ${document.documentElement.scrollWidth} of ${innerWidth} small ${small} wide ${wide}`;
});
</script>"""


@pytest.mark.part("docs")
@pytest.mark.browser
@pytest.mark.parametrize("scheme", [0, 1], ids=["dark", "light"])
@pytest.mark.parametrize("width", [390, 1200])
def test_the_page_renders_in_a_browser_and_fits_its_width(tmp_path: Path, width: int, scheme: int) -> None:
    from PIL import Image

    log_a_run(tmp_path)
    page = write_report(tmp_path)
    shot = tmp_path / "page.png"
    setting = f"--blink-settings=preferredColorScheme={scheme}"
    done = browse(page, tmp_path, f"--screenshot={shot}", f"--window-size={width},1800", setting)
    assert "CONSOLE" not in done.stderr, done.stderr
    image = Image.open(shot).convert("RGB")
    colors = image.getcolors(1 << 24) or []
    assert len(colors) > 200, "plots and text are drawn"
    most = max(colors)
    assert most[0] < 0.9 * image.width * image.height
    assert (sum(image.getpixel((2, 2))) < 200) == (scheme == 0), "light and dark are different pages"

    measured = tmp_path / "measured.html"
    allowing_scripts = re.sub(r"<meta http-equiv=[^>]*>", "", page.read_text())
    measured.write_text(allowing_scripts.replace("</body>", MEASURE + "</body>"))
    # A window cannot be narrower than 500 on some systems; a frame can.
    frame = tmp_path / "frame.html"
    frame.write_text(f'<iframe src="measured.html" style="width:{width}px;height:1600px;border:0"></iframe><script>'
                     'document.querySelector("iframe").onload = event => { document.body.append('
                     'event.target.contentDocument.title) }</script>')  # fmt: skip
    dom = browse(frame, tmp_path, "--dump-dom", "--allow-file-access-from-files", "--virtual-time-budget=3000").stdout
    found = re.search(r"width (\d+) of (\d+) small (\d+) wide (\d+)", dom)
    assert found is not None, dom[-500:]
    scroll, inner, small, wide = map(int, found.groups())
    assert inner == width
    assert scroll <= width, "nothing to scroll sideways"
    assert (small, wide) == (0, 0)
