"""Prefill and decode steps over paged KV. Start with interface.py; README.md has the order.

This package and its pure modules (interface, pages, batching, sampling) do not import torch,
because the launcher and the simulator use them too.
"""
