"""`mooncake doctor`: checks whether this host can serve and whether a running system works."""
