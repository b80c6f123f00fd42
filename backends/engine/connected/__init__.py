"""Shared by all engines that have processes and KV pages of their own."""
