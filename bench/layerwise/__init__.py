"""How much does it save to load a prefix layer by layer?"""
