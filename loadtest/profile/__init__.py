"""How long a real worker takes, measured as a client: `mooncake profile`.

The file that it writes is what the simulator's table model reads (profile.py).
"""
