"""Questions asked of simulated clusters: one file each, with its rows and its promised numbers."""
