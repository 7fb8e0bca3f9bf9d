"""Config file and questionnaire; placement of processes, threads and memory; the launchers of one host and of many.

Nothing here imports torch until a launcher of several processes needs its elastic agent.
"""

from __future__ import annotations

from stoker.launch.config.config_file import Config
from stoker.launch.placement.divide_cores import Placement, place

__all__ = ["Config", "Placement", "place"]
