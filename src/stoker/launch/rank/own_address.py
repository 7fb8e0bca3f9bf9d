"""Scripts that choose the address of the ranks' store themselves, as those written for mpirun do.

torchrun's agent serves a store, so its ranks only connect to one. A script with a MASTER_PORT or `tcp://` address of its own
would wait for a store that nobody serves; there rank 0 has to serve it, as without an agent.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

from stoker.after_import import after_import
from stoker.requires import supported

__all__ = ["serve_own_addresses"]

_AGENT_SERVES = "TORCHELASTIC_USE_AGENT_STORE"


def serve_own_addresses() -> None:
    """From now on rank 0 serves a store whose address is not the agent's. To be called before the script changes it."""
    if os.environ.get(_AGENT_SERVES) == "True":
        agents = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        after_import("torch.distributed.rendezvous", functools.partial(_wrap, agents))


def _wrap(agents: tuple[str | None, str | None]) -> None:
    if not supported("own address"):
        return
    rendezvous: Any = sys.modules["torch.distributed.rendezvous"]  # torch.distributed has a function of that name
    create = rendezvous._create_c10d_store

    @functools.wraps(create)
    def create_store(hostname: str, port: int, *args: Any, **named: Any) -> Any:
        if (hostname, str(port)) == agents:
            return create(hostname, port, *args, **named)
        agent_serves = os.environ.pop(_AGENT_SERVES, None)
        try:
            return create(hostname, port, *args, **named)
        finally:
            if agent_serves is not None:
                os.environ[_AGENT_SERVES] = agent_serves

    rendezvous._create_c10d_store = create_store
