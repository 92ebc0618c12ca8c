"""Package description of mkd. Versions that are known to work together are pinned in constraints.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "mkd/version.py").read_text(encoding="utf-8")).group(1)

setup(
    name="megatron-kd",  # the import and the command are mkd; `mkd` on PyPI is another project
    version=VERSION,
    description="Distils large language models on Megatron-core",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["mkd", "mkd.*"]),
    entry_points={"console_scripts": ["mkd = mkd.__main__:main"]},
    python_requires=">=3.10",
    install_requires=[
        "megatron-core==0.16.1",
        "torch>=2.9",
        "numpy",
        "PyYAML",
        "sentencepiece",
        "transformers",
        "safetensors",
        "huggingface_hub",
        "protobuf",  # transformers reads SentencePiece models with it
    ],
    extras_require={
        "te": ["transformer-engine[pytorch]>=2.9,<2.12"],
        "data": ["pyarrow>=16"],
        "xtoken": ["numba"],  # compiles the alignment mode dp
        "tiktoken": ["tiktoken"],  # rank files as tokenizers
        "log": ["tensorboard", "wandb"],
        "dev": ["pytest", "ruff", "import-linter", "mypy"],
        "quickstart": ["gguf", "accelerate", "matplotlib", "tensorboard"],
    },
)
