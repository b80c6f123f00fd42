"""How is a server reached, and what does it report? Requests, answers, and its description."""
