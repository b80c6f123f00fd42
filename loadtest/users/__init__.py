"""What do users meet? Users under Locust: what they send, and what came of it."""
