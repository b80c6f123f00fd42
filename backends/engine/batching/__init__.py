"""What does one engine step compute, and in which pages? Pure."""
