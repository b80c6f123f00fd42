"""How bytes get from a node's memory to ours and back: mapped, NIXL, plain TCP; and which one."""
