"""What becomes of a request at every event: a pure state machine."""
