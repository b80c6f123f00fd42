"""Predicted load of each worker, now and at a later moment."""
