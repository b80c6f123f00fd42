"""The same workers on TensorRT-LLM."""
