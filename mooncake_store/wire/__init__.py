"""Messages between processes: framing, request and reply, verbs, one-way messages."""
