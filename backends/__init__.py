"""Workers, Triton models, launcher and command line. Routing decisions are in `conductor/`."""
