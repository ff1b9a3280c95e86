"""Run the command line as `python -m ddtree_bench`."""

import sys

from ddtree_bench.cli import main

sys.exit(main())
