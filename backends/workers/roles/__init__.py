"""Role changes of a worker in service."""
