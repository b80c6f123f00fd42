"""The experiments on simulated clusters: one file each, with its rows and targets."""
