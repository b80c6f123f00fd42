"""How processes say it: verbs, framing, request and reply."""
