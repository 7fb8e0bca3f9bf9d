"""`python -m stoker`, for where the `stoker` script is not on PATH."""

import sys

from stoker.cli import main

sys.exit(main())
