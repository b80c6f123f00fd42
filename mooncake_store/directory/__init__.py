"""The directory of blocks and copies: its pure core, its process, its clients and its election."""
