# SPDX-License-Identifier: Apache-2.0
"""Packaging of omni_engine. Ranges here are wide; requirements/*.txt pin the set that is tested."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "omni_engine" / "__init__.py").read_text("utf-8"), re.MULTILINE)
if VERSION is None:
    raise RuntimeError('omni_engine/__init__.py: no line __version__ = "..."; setup.py takes the version from it')
README = ROOT / "README.md"

setup(
    name="omni_engine",
    version=VERSION.group(1),
    description="Reinforcement learning of diffusion and omni-modal generative models on Megatron-core",
    long_description=README.read_text("utf-8") if README.is_file() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["omni_engine", "omni_engine.*"]),
    install_requires=[
        "torch>=2.6",
        "megatron-core>=0.16.1,<0.17",
        "diffusers>=0.35",
        "transformers>=4.51",
        "accelerate>=1.0",
        "safetensors>=0.4",
        "numpy>=1.26",
        "pillow>=10",
        "psutil>=5.9",
        "PyYAML>=6.0",
        "tqdm>=4.60",
        "packaging>=24.2",
        "einops>=0.7",
        "tensorboard>=2.14",
    ],
    extras_require={
        "ocr": [
            "rapidocr>=3.10",
            'rapidocr-onnxruntime>=1.4.4; python_version < "3.13"',
            "onnxruntime>=1.17",
            "rapidfuzz>=3.6",
        ],
        "plot": ["matplotlib>=3.8"],
        "wandb": ["wandb>=0.17"],
        "dev": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "ruff>=0.9",
            "mypy>=1.13",
            "types-PyYAML",
            "types-psutil",
            "types-tqdm",
        ],
    },
    classifiers=[
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
