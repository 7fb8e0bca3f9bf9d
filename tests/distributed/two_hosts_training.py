"""One rank of a training on fake hosts: `two_hosts_training.py FOLDER BACKEND`; rank 0 writes its weights to FOLDER."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from distributed.training_cases import train

torch.set_num_threads(1)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
settings = {"rows": 61, "optim": "sgd", "learning_rate": 0.2, "max_steps": 10, "ddp_timeout": 100}
found = train(rank, size, sys.argv[1], {**settings, **({"ddp_backend": sys.argv[2]} if size > 1 else {})})
if rank == 0:
    np.save(Path(sys.argv[1]) / f"weights{size}.npy", found["weights"])
print(f"rank {rank} of {size} has trained", flush=True)
if size > 1:
    torch.distributed.destroy_process_group()
