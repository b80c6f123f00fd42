"""Predicted and measured times: fits, speed ratios, output lengths."""
