"""Ours beside the real vLLM: one machine, one model, one client (`python -m bench.headline`)."""
