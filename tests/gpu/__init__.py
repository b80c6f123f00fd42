"""Tests that need a GPU: skipped elsewhere, with the reason."""
