"""One run, or several side by side, as a page for people that a program can read back."""
