"""Python imports this at its start if the directory is on PYTHONPATH: records what the process executes (../reach.py)."""

import importlib.util
import os

if "STOKER_REACH" in os.environ:
    _spec = importlib.util.spec_from_file_location(
        "stoker_reach", os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "reach.py")
    )
    assert _spec is not None
    assert _spec.loader is not None
    _reach = importlib.util.module_from_spec(_spec)
    import sys

    sys.modules["stoker_reach"] = _reach
    _spec.loader.exec_module(_reach)
    _reach.start()
