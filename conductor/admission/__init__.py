"""Admission: limits, fair shares, tenant quotas, the re-check at decode."""
