# SPDX-License-Identifier: Apache-2.0
"""Set-up of all tests, before any of them imports torch: one compute thread a process, and no network."""

from __future__ import annotations

import os

# Several test processes share few cores, and threads that wait for a busy core cost more than they give.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# What a test loads must come from disk: a missing file is a failure, not a download.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
