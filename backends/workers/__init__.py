"""Prefill and decode workers: jobs, KV in, KV out, membership."""
