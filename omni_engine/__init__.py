# SPDX-License-Identifier: Apache-2.0
"""omni_engine trains diffusion and omni-modal generative models by reinforcement learning on Megatron-core.

Importing the package imports neither torch nor Megatron. It only registers an import hook, so that the platform in use
(see `omni_engine.platform`) can prepare `megatron.core` when that is first imported.
"""

from omni_engine.platform import megatron_hook

__version__ = "0.1.0"

megatron_hook.register()
