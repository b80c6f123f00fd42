"""Part of the stand-in for tensorrt_llm."""

from tensorrt_llm.llmapi.llm import GuidedDecodingParams

__all__ = ["GuidedDecodingParams"]
