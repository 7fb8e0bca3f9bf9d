"""The live page in a real browser: curves grow with the log, a killed run is shown as killed, nothing else is loaded."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rig.chromium import browser
from stoker.process_life import facts_of
from stoker.run_report.live_server import LiveServer, Viewer
from stoker.run_report.log import RunLog

POINTS = "(document.querySelector('#chart-loss path')?.getAttribute('d').match(/[ML]/g) ?? []).length"


@pytest.mark.part("docs")
@pytest.mark.browser
def test_curves_grow_with_the_log_and_a_killed_run_is_shown_as_killed(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    log = RunLog(tmp_path)
    log.write("start", task="qa", model="org/bert", process=facts_of(process.pid), command="stoker train '<script>'")
    log.write("model", type="Bert", parameters=10, steps=100)
    server = LiveServer(Viewer(tmp_path, every=0.1))
    thread = threading.Thread(target=server.serve)
    thread.start()

    def train(first: int, last: int) -> None:
        for step in range(first, last + 1):
            log.write("step", step=step, loss=math.exp(-step / 30), learning_rate=1e-4, tokens_per_second=1000.0 + step,
                      share_of_peak=0.6, phases={"forward": 1.0, "backward": 2.0})  # fmt: skip
            log.write("waits", step=step, rows=[[step, 1, 0.2, 0.0]])

    try:
        with browser(tmp_path) as page:
            page.show(1200, 1400)
            page.open(server.address)
            page.wait_for("document.querySelector('.pill')?.textContent === 'running'")
            assert page.evaluate(POINTS) == 0
            train(1, 10)
            assert page.wait_for(f"{POINTS} === 10")
            assert page.evaluate("document.querySelectorAll('svg.chart').length") == 4
            assert "rank 1" in page.evaluate("document.querySelector('#chart-waits-plot').textContent")
            assert page.evaluate("document.querySelector('progress').value") == 0.1
            page.evaluate("document.querySelector('#waits details').open = true")
            train(11, 30)
            log.write("evaluation", step=30, eval_f1=55.5)
            log.write(
                "examples", rows=[{"texts": ["<b id=injected>"], "answer": "yes", "expected": ["no"], "right": False}]
            )
            page.wait_for("document.querySelector('#chart-scores') && document.querySelector('.example')")
            assert page.wait_for(f"{POINTS} === 30")
            assert page.evaluate("document.querySelector('#waits details').open"), "what the reader opened stays open"
            assert page.evaluate("document.querySelector('.example').textContent.includes('<b id=injected>')")
            assert page.evaluate("document.querySelector('#injected')") is None
            process.kill()
            process.communicate()
            page.wait_for("document.querySelector('.pill').textContent === 'killed'")
            assert page.evaluate("document.title").startswith("killed")
            for width, dark in ((1200, False), (390, True)):
                page.show(width, 1400, dark=dark)
                page.wait_for(f"innerWidth === {width}")
                assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing to scroll sideways"
                color = page.evaluate("getComputedStyle(document.body).backgroundColor")
                assert (color == "rgb(20, 22, 26)") == dark
            heights = "[...document.querySelectorAll('svg text')].map(one => one.getBoundingClientRect().height)"
            assert page.evaluate(f"{heights}.filter(one => one > 0 && one < 7).length") == 0
            log.write("start", resumed_at=20, task="qa", process=facts_of(os.getpid()))
            assert page.wait_for(f"{POINTS} === 20"), "a resumed run takes back the steps that it repeats"
            server.viewer.end()
            page.wait_for("document.querySelector('#connection').textContent.startsWith('The server has ended')")
            loaded = page.evaluate("performance.getEntriesByType('resource').map(one => one.name).join(' ')")
            assert all(one.startswith(server.address) for one in loaded.split()), loaded
            assert page.messages == [], "no error, and nothing that the policy refused"
    finally:
        server.viewer.end()
        thread.join()
        process.kill()
        process.communicate()
