"""How many bytes per second does the store move, beside memcpy, NIXL, the disk and Mooncake's?"""
