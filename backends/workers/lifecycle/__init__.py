"""The life of a job at a worker: pure state machines."""
