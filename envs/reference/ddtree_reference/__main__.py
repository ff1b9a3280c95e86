"""`python -m ddtree_reference`."""

from __future__ import annotations

import sys

from ddtree_reference.cli import main

if __name__ == "__main__":
    sys.exit(main())
