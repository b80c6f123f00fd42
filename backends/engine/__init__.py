"""Prefill and decode steps over paged KV. README.md lists the modules in reading order.

The modules outside torch/ and trtllm/ do not import torch, because the launcher and the simulator
also use some of them.
"""
