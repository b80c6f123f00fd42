"""Garbage at every listener, as processes: they go on serving and do not grow."""
