"""What does a browser see of the system, and who sees how much?"""
