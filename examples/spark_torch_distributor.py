"""Spark's TorchDistributor: `pip install pyspark 'stoker[hf]'` and Java, then `python examples/spark_torch_distributor.py`.

TorchDistributor starts the ranks with torchrun, on the driver (`local_mode=True`) or on the executors. The function makes no
process group: `setup()` does that.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession


def train_on_rank(examples: str, output: str) -> dict[str, Any]:
    import sys

    sys.path.insert(0, examples)
    from train_small_classifier import train

    return train(output)


if __name__ == "__main__":
    output = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else "out/spark")
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    distributor = TorchDistributor(num_processes=2, local_mode=True, use_gpu=False)
    print("result", distributor.run(train_on_rank, str(Path(__file__).parent), output))  # what rank 0 returned
    spark.stop()
