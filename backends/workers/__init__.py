"""Prefill and decode workers: jobs, loading and writing KV, membership."""
