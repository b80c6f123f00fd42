"""Which block is where. Pure."""
