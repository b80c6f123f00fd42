"""How much does serving add to the bare engine?"""
