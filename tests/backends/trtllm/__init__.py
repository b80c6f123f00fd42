"""Tests of the worker's side of TensorRT-LLM, over the stand-in package."""
