"""A stand-in for tensorrt_llm without compiled parts; see the README beside this package."""

from tensorrt_llm._exports import __getattr__
from tensorrt_llm._fake.api import VERSION as __version__

__all__ = ["__getattr__", "__version__"]
