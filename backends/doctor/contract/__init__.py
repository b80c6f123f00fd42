"""Names, arguments and orders of calls of TensorRT-LLM that are used, and their comparison."""
