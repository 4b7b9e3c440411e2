# SPDX-License-Identifier: Apache-2.0
from tests.single_process import single_process

__all__ = ["single_process"]
