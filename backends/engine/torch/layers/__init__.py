"""The parts of a decoder layer: kinds of attention and of feed-forward."""
