"""Tests for the interpreter that has vLLM: `.venv-vllm/bin/python -m pytest tests/vllm/inside`."""
