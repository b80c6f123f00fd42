"""`mooncake status`: what a running server says of itself, in a terminal."""
