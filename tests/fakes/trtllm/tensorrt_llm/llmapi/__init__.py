"""Part of the stand-in for tensorrt_llm."""
