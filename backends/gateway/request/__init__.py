"""What does a client ask for?"""
