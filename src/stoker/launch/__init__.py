"""`stoker config` and `stoker launch`: the config file, placement on cores and hosts, launchers, and what runs inside a rank.

Nothing in this package imports torch until the elastic agent is needed.
"""

from __future__ import annotations

from stoker.launch.config.config_file import Config
from stoker.launch.placement.divide_cores import Placement, place

__all__ = ["Config", "Placement", "place"]
