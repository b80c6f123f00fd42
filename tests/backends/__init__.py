"""Tests of the workers, the Triton glue and the launcher."""
