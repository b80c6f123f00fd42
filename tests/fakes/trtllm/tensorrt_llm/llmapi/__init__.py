"""Part of the stand-in for tensorrt_llm."""

from tensorrt_llm._exports import __getattr__

__all__ = ["__getattr__"]
