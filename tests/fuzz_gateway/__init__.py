"""Requests that schemathesis makes of the gateway's own description, right ones and wrong ones:
`python -m tests.fuzz_gateway` (make fuzz-gateway)."""
