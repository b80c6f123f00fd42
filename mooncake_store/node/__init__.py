"""The storage node: a process that owns memory and an SSD, and what it is asked."""
