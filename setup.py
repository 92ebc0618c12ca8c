"""Package description of mkd. The ranges are those of mkd/tested_versions.py; constraints.txt has pins."""

import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "mkd/version.py").read_text(encoding="utf-8")).group(1)
PACKAGED = ("constraints.txt", "configs/*.yaml", "launch/*.sh", "launch/*.sbatch", "launch/*.py")


class BuildWithPackagedFiles(build_py):
    """Copy into mkd/packaged what a checkout has beside mkd: see mkd/config/packaged.py."""

    def run(self):
        super().run()
        if self.editable_mode:
            return  # an editable mkd finds them in the checkout
        target = Path(self.build_lib) / "mkd" / "packaged"
        for path in [path for pattern in PACKAGED for path in sorted(ROOT.glob(pattern))]:
            self.mkpath(str((target / path.relative_to(ROOT)).parent))
            self.copy_file(str(path), str(target / path.relative_to(ROOT)))


setup(
    cmdclass={"build_py": BuildWithPackagedFiles},
    name="megatron-kd",  # the import and the command are mkd; `mkd` on PyPI is another project
    version=VERSION,
    description="Distils large language models on Megatron-core",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["mkd", "mkd.*"]),
    package_data={"mkd.report": ["assets/*"]},
    entry_points={"console_scripts": ["mkd = mkd.__main__:main"]},
    python_requires=">=3.10",
    install_requires=[
        "megatron-core>=0.16.1,<0.20",  # pip takes 0.16.1 on Python 3.10 and 3.11: newer ones need 3.12
        "torch>=2.9.0a0,<2.14",  # a0: those of NVIDIA's containers
        "numpy>=1.26,<3.0",
        "PyYAML",
        "Jinja2",
        "sentencepiece",
        "transformers>=5.0,<6.0",
        "safetensors",
        "huggingface_hub",
        "protobuf",  # transformers reads SentencePiece models with it
    ],
    extras_require={
        "te": [  # megatron-core 0.16.1 and newer ones, whose bounds differ
            "transformer-engine[pytorch]>=2.9,<2.12 ; python_version < '3.12'",
            "transformer-engine[pytorch]>=2.9 ; python_version >= '3.12'",
        ],
        "data": [
            "pyarrow>=16",
            "zstandard>=0.19 ; python_version < '3.14'",  # newer ones have it in the standard library
        ],
        "images": ["pillow>=10.1"],  # decodes the images of vision-language models
        "hybrid": ["fla-core>=0.6,<0.7"],  # kernels of gated delta nets on GPUs: Qwen3.5, Qwen3-Next
        "quantised": ["bitsandbytes>=0.45"],  # frozen weights in NF4
        "xtoken": ["numba"],  # compiles the alignment mode dp
        "tiktoken": ["tiktoken"],  # rank files as tokenizers
        "log": ["tensorboard", "wandb"],
        "mlflow": ["mlflow"],
        "trackio": ["trackio"],
        "plot": ["matplotlib"],  # `mkd report --png`
        "dev": [
            "pytest",
            "pytest-xdist",
            "pillow>=10.1",
            "matplotlib",
            "accelerate",
            "ruff",
            "import-linter",
            "mypy",
        ],
        "docs": ["mkdocs-material>=9.5,<10"],  # `make docs`
        "quickstart": ["gguf", "accelerate", "matplotlib", "tensorboard", "pillow>=10.1"],
    },
)
