"""OpenAI's Responses: requests, items, events, and the responses that are stored."""
