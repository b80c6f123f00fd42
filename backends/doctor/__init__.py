"""Is this host fit to serve, and does what serves here do well? Each finding says what to do."""
