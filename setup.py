"""Metadata of the distribution `longctx-jax` (the name `longctx` is taken on the package index)."""

from pathlib import Path

from setuptools import find_packages, setup

# Plots, reports and figures.
PLOT = ["matplotlib>=3.9"]
# The documentation's site, and the notebooks of examples/.
DOCS = [*PLOT, "mkdocs-material>=9.7", "mkdocstrings[python]>=1.0"]
NOTEBOOKS = [*PLOT, "ipykernel>=7", "jupytext>=1.19", "nbclient>=0.10"]
# Flax modules (`longctx.nnx`), and what the examples train with.
TRAIN = ["flax>=0.12", "optax>=0.2.5", "orbax-checkpoint>=0.11"]
# Models from where they are: llama.cpp's files, and the Hugging Face hub.
GGUF, HUB = ["gguf>=0.17"], ["huggingface_hub>=1.0"]

# Spans of requests, sent to a collector.
OTLP = ["opentelemetry-sdk>=1.30", "opentelemetry-exporter-otlp-proto-http>=1.30"]
# HTTP: `longctx serve`.
SERVE = [
    "fastapi>=0.135",
    "httpx>=0.28",  # to other servers
    "prometheus-client>=0.21",
    "pydantic>=2.10",
    "pyzmq>=26",
    "sse-starlette>=3.0",
    "uvicorn[standard]>=0.30",
]

# Pages of the KV cache between engines in different processes.
TRANSFER = ["pyzmq>=26", "xxhash>=3.5"]
# Besides over Mooncake's transfer engine, and in its distributed store. Its libraries need Debian's libibverbs1,
# libnl-3-200 and libnl-route-3-200, or what other systems call these.
MOONCAKE = [*TRANSFER, "mooncake-transfer-engine-non-cuda>=0.3.13"]

# Instances of a cluster on many machines.
CLUSTER = [*SERVE, *TRANSFER, "ray>=2.40"]

setup(
    name="longctx-jax",
    version="0.1.0",
    description="Exact inference over very long contexts in JAX",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["longctx", "longctx.*"]),
    package_data={"longctx": ["py.typed", "*.pyi", "*/*.pyi", "models/tiny/*", "serving/server/page/*"]},
    entry_points={"console_scripts": ["longctx = longctx.cli:program"]},
    install_requires=[
        "jax>=0.10",
        "jaxtyping>=0.3",
        "lazy_loader>=0.4",
        "numpy>=2.0",
        "scipy>=1.13",
        "einops>=0.8",
        "safetensors>=0.5",
        "tokenizers>=0.21",
        "jinja2>=3.1",
        "msgspec>=0.19",  # records of an engine's log
        "platformdirs>=4.2",
        "prompt_toolkit>=3.0.36",
        "tqdm>=4.66",
        "xxhash>=3.4",  # checksums of KV pages outside of devices
    ],
    extras_require={
        "cluster": CLUSTER,
        "cuda12": ["jax[cuda12]>=0.10"],
        "cuda13": ["jax[cuda13]>=0.10"],
        # Compiles for GPUs where there is none. Where it is installed, JAX looks for a driver in every process:
        # `make test` installs it aside.
        "aot": ["jax-cuda12-plugin>=0.10"],
        "distributed": ["pyzmq>=26"],  # one engine in many processes
        "docs": DOCS,
        "gguf": GGUF,
        "hub": HUB,
        "mooncake": MOONCAKE,
        "notebooks": NOTEBOOKS,
        "otlp": OTLP,
        "plot": PLOT,
        "serve": SERVE,
        "train": TRAIN,
        "transfer": TRANSFER,
        "test": [
            *DOCS,
            *NOTEBOOKS,
            *GGUF,
            *HUB,
            *TRAIN,
            *OTLP,
            *SERVE,
            *MOONCAKE,
            "accelerate>=1.0",  # with which transformers loads GGUF
            "build>=1.2",
            "chex>=0.1.90",
            "filelock>=3.16",  # with which JAX locks its store of compiled programs
            "compressed-tensors>=0.15",  # with which transformers runs FP8 checkpoints on a CPU
            "openai>=2",
            "playwright>=1.50",
            "pytest>=8",
            "pyyaml>=6",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "mpmath>=1.3",
            "ruff>=0.14",
            "schemathesis>=4",
            "sentencepiece>=0.2",
            "mypy>=1.18",
            "pre-commit>=4",
            "promql-parser>=0.5",  # reads the queries of the dashboard
            "torch==2.13.0",
            "transformers>=5.0",
        ],
    },
    classifiers=[
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
