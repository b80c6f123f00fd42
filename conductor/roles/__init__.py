"""Role changes of workers between prefill and decode."""
