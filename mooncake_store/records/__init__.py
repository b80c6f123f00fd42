"""Records of blocks, nodes and workers that processes exchange. Pure."""
