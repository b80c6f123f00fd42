"""The lifecycle of a request: a pure state machine."""
