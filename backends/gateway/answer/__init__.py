"""What does a client receive?"""
