"""Shared set-up of the tests."""

import os

# Before torch is imported: on a machine of few cores many ranks with many threads each would stand in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
