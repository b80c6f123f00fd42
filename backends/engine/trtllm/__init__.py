"""TensorRT-LLM as an engine: the connector inside its processes, the worker's side outside them."""
