"""Authentication between processes: keys and certificates of a host, and their use by sockets."""
