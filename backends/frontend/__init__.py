"""A client's request: read, decided, followed, answered."""
