"""Tests of bench/harness."""
