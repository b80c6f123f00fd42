"""What a layer of a decoder computes: kinds of attention and of feed-forward."""
