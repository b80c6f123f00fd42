"""The SSD tier of a storage node: one file of blocks, and a manifest of its content."""
