"""Part of the stand-in for tensorrt_llm."""

from tensorrt_llm.inputs.utils import get_cache_salt_id

__all__ = ["get_cache_salt_id"]
