"""Trains the demo model: its corpus, the training, the plot of its loss."""
