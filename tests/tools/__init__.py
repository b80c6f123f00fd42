"""Scripts that record test data; run by hand, never by tests."""
