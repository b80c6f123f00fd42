"""Workers, Triton glue, launcher and command line. What decides is in `conductor/`."""
