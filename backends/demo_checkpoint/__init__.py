"""The checkpoint that is served by default, and how it was trained."""
