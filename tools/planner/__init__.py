# SPDX-License-Identifier: Apache-2.0
"""Which layout a model is trained best under, by arithmetic: memory of the fullest rank, time of each phase.

`tools/plan.py` is its face.
"""
