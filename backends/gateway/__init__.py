"""OpenAI's interface in front of the conductor."""
