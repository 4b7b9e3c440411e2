# SPDX-License-Identifier: Apache-2.0
"""Programs that work on checkpoints without a training run."""
