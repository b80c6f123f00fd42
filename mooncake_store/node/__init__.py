"""The storage node: the process that owns a memory segment and an SSD, and its control socket."""
