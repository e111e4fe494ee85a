"""One stage of the ring: slot table, stage core, layer blocks, and the daemon around them."""
