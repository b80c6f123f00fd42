"""How long would it take? Fits, measured against estimated, output lengths."""
