"""Experiments on recorded requests that need no server: the real store and policies, no GPU.

Each file is one noun; `command.py` is what `mooncake simulate` calls.
"""
