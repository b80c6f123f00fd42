"""Prefill and decode steps over paged KV. Start with interface.py; README.md has the order.

Importing this package or its pure files (interface, pages, batching, sampling) loads no torch: the
launcher and the simulator use them too.
"""
