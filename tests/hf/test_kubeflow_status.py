"""Progress reaches `TrainJob.status` by transformers' own KubeflowCallback, also from ranks that `stoker launch` has started.

An HTTP server stands for the status endpoint of Kubeflow Trainer, because no cluster can run here; the real one speaks HTTPS.
What arrives is validated by the operator's published schema (package kubeflow-trainer-api).
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import kubeflow_trainer_api.models as api
import pytest
import transformers.integrations

from rig import warm

pytestmark = pytest.mark.skipif(
    not hasattr(transformers.integrations, "KubeflowCallback"), reason="this transformers has no KubeflowCallback"
)
SCRIPT = Path(__file__).parent.parent / "launch" / "scripts" / "tiny_training.py"
STOKER = [sys.executable, "-c", "import sys; from stoker.cli import main; sys.exit(main(sys.argv[1:]))"]


class Endpoint(HTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.received: list[tuple[str | None, dict[str, Any]]] = []


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append((self.headers["Authorization"], json.loads(body)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *about: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.part("launch")
def test_the_first_rank_reports_progress_from_0_to_100_percent(endpoint: Endpoint, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    variables = {
        "KUBEFLOW_TRAINER_SERVER_URL": f"http://127.0.0.1:{endpoint.server_port}/status",
        "KUBEFLOW_TRAINER_SERVER_TOKEN": str(tmp_path / "token"),
        "XDG_CONFIG_HOME": "/nonexistent",
    }
    words = [*STOKER, "launch", "-n", "2", str(SCRIPT), "--output_dir", str(tmp_path / "out"), "0"]
    done = warm.run(words, env={**os.environ, **variables}, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert {token for token, _ in endpoint.received} == {"Bearer secret"}
    statuses = [body["trainerStatus"] for _, body in endpoint.received]
    for body in (body for _, body in endpoint.received):
        assert api.TrainerV1alpha1UpdateTrainJobStatusRequest.from_dict(body) is not None
    percents = [status["progressPercentage"] for status in statuses]
    assert percents == sorted(percents)
    assert (percents.count(0), percents[0], percents.count(100), percents[-1]) == (1, 0, 1, 100), "one rank reports"
    last = {metric["name"]: metric["value"] for metric in statuses[-1]["metrics"]}
    assert float(last["loss"]) > 0
