"""Whether a request is served: limits, fair shares, the re-check at decode."""
