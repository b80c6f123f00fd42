"""Prints `name==version` of what TensorRT-LLM or vLLM needs just as it is, for `pip install -c`.

torch's compiler is the distribution `triton` or, where NVIDIA has built torch, `pytorch_triton`.

Not here: what this project needs (pyproject.toml).
"""

from importlib.metadata import PackageNotFoundError, version

KEPT = (
    "numpy",
    "protobuf",
    "pydantic",
    "pytorch-triton",
    "tensorrt-llm",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
    "vllm",
)

for name in KEPT:
    try:
        found = version(name)
    except PackageNotFoundError:
        continue
    print(f"{name}=={found}")
