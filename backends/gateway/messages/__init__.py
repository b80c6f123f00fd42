"""Anthropic's Messages: requests and events."""
