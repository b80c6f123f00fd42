"""Who may speak to whom: keys and certificates of a host, and what they do to sockets."""
