# SPDX-License-Identifier: Apache-2.0
"""Layers that several MMDiT families share: norms and modulation, rotary positions, joint attention, embeddings."""
