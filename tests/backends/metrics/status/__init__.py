"""Tests of `mooncake status`."""
