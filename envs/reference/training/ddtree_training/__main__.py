"""Run a training command: python -m ddtree_training."""

import sys

from ddtree_training.cli import main

sys.exit(main())
