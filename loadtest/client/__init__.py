"""How is a server reached, and what does it say? Requests, answers, its description, its page."""
