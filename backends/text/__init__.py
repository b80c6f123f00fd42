"""Tokenisation, detokenisation and guided decoding."""
