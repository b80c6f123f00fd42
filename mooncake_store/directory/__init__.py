"""Which block is where: the pure core, its process, and how others reach it."""
