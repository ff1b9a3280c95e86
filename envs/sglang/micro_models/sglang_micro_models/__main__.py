"""`python -m sglang_micro_models`."""

import sys

from sglang_micro_models.cli import main

sys.exit(main())
