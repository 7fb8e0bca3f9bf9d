"""optimize(): padding, fused layers, precision, memory, for torch modules and transformers models. Trainers are in `stoker.hf`.

Read in this order: optimize.py (which module gets which override), class_swap.py (how), families.py (the table),
padding_free.py and sequences.py (padding), fused_layer.py, leaf_modules.py, heads.py; then the small files.
"""

from stoker.model.clip_gradients import clip_grad_norm_
from stoker.model.memory import minor_faults
from stoker.model.optimization_report import Report, report
from stoker.model.optimize import optimize, restore

__all__ = ["Report", "clip_grad_norm_", "minor_faults", "optimize", "report", "restore"]
