"""Tests of the conductor: units, scenarios in text, and long random runs."""
