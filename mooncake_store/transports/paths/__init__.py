"""Which path do bytes take, and what does it cost? Pure."""
