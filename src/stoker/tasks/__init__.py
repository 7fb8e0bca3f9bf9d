"""`stoker train`, `ask` and `demo`: data, metrics, post-processing and the run itself, with a package per task."""

import logging

# While transformers imports it, bitsandbytes advises users of CPUs with bf16 units to install a package. `loading.quiet` is too late.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
