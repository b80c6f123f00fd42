"""How does a worker change its role while it serves?"""
