"""optimize(): unpad, fuse, precision, memory. Knows torch modules and encoder families, not trainers.

Read in this order: optimize.py (what goes where), class_swap.py (how), families.py (the table), sequences.py and padding_free.py
(padding), fused_layer.py (the fused layer), leaf_modules.py, heads.py; then the small ones.
"""

from stoker.model.clip_gradients import clip_grad_norm_
from stoker.model.memory import minor_faults
from stoker.model.optimization_report import Report, report
from stoker.model.optimize import optimize, restore

__all__ = ["Report", "clip_grad_norm_", "minor_faults", "optimize", "report", "restore"]
