"""vLLM as an engine: a process with an interpreter of its own, and our connector inside it."""
