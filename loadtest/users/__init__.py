"""What do users measure? Simulated users under Locust: their requests and their results."""
