# SPDX-License-Identifier: Apache-2.0
"""Makes the quick-start base model: a Qwen-Image pipeline of 3 M parameters that writes three digits, weakly."""
