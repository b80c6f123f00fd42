"""Batching: decides which tokens one engine step computes, and in which pages. Pure."""
