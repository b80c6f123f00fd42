"""`mooncake init`: a first model repository without a checkout."""
