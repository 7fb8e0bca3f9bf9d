"""`stoker train`, `ask` and `demo`: data, metrics, post-processing and the run itself, with a package per task."""

import logging

# bitsandbytes advises users of CPUs with bf16 units to install a package, while transformers imports it: before `loading.quiet`.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
