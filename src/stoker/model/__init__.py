"""optimize(): unpad, fuse, precision, memory. Knows torch modules and encoder families, not trainers.

Read in this order: optimize.py (what goes where), swap.py (how), families.py (the table), sequences.py and door.py
(padding), layer.py (the fused layer), leaves.py, heads.py; then the small ones.
"""

from stoker.model.clip import clip_grad_norm_
from stoker.model.memory import minor_faults
from stoker.model.optimize import optimize, restore
from stoker.model.report import Report, report

__all__ = ["Report", "clip_grad_norm_", "minor_faults", "optimize", "report", "restore"]
