"""Tests: the folders mirror the packages; e2e/ starts the real Triton."""
