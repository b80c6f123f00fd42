"""The request as connectors see it."""

from tensorrt_llm._fake.request import LlmRequest

__all__ = ["LlmRequest"]
