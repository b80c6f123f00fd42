"""`mooncake status`: the metrics of a running server, in a terminal."""
