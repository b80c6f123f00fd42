"""What is said of blocks, nodes and workers: records that travel. Pure."""
