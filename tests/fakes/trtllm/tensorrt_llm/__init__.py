"""A stand-in for tensorrt_llm without compiled parts; see the README beside this package."""

from tensorrt_llm._exports import __getattr__

__version__ = "1.3.0rc14"
__all__ = ["__getattr__", "__version__"]
