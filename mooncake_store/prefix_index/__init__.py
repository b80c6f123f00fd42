"""Who has how much of a prompt. Pure."""
