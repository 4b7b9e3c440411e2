# SPDX-License-Identifier: Apache-2.0
"""A fixture for tests that need Megatron's parallel state in this one process."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from functools import cache

import pytest
import torch.distributed as dist

import omni_engine  # noqa: F401 - prepares megatron.core's import
from omni_engine.arguments import ParallelSettings
from omni_engine.parallel import ParallelGroups, destroy, initialize
from omni_engine.platform import get_platform


@cache
def _groups() -> ParallelGroups:
    """Built once, whichever of the folders that import the fixture asks first."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dist.init_process_group(get_platform().dist_backend, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    return initialize(ParallelSettings(), seed=0)


@pytest.fixture(scope="session")
def single_process() -> Iterator[ParallelGroups]:
    """Groups of size one."""
    yield _groups()
    destroy()
