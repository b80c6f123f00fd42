"""Tests of mooncake_store."""
