"""What holds for every test: one thread, no network, no Ray token on disk, reproducible examples."""

from __future__ import annotations

import os
import signal

# Before torch, tokenizers and ray are imported anywhere: they read these once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
if not os.path.exists("/dev/nvidiactl"):  # kernels for GPUs are interpreted where there is none
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import settings

# What is started in the background, as by some CI, ignores SIGINT, and so would every server that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Machines that run tests are shared: a slow example is no fault, and the same examples run everywhere.
settings.register_profile("draftree", deadline=None, derandomize=True, database=None)
settings.load_profile("draftree")
