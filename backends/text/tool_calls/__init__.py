"""Tool calls: what the model reads of them, and what it writes."""
