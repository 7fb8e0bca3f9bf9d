"""What PyTorch's own tests of torch.distributed find right with gloo, they find right with ccl."""

from __future__ import annotations

import concurrent.futures

import pytest

from comm import certify


@pytest.mark.part("certify")
def test_ccl_passes_what_gloo_passes() -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        gloo, ccl = pool.map(lambda backend: certify.run(backend, 2, 2, certify.EVERY_TIME), ("gloo", "ccl"))
    assert sum(outcome == "passed" for outcome, _ in gloo.values()) > 40
    missing = certify.failures(gloo, ccl)
    assert not missing, "\n\n".join(f"{name}: {why}" for name, why in missing.items())
