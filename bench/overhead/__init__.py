"""What does serving add to the bare engine?"""
