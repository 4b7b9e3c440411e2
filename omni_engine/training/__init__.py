# SPDX-License-Identifier: Apache-2.0
"""Training: the loop on top of all other parts. `build_run` puts a run together, `train` runs it."""
