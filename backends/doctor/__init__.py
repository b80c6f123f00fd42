"""Is this host fit to serve, and does what serves here do well? Each finding has its remedy."""
