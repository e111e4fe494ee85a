"""Frame logs at the desk: read, show, prove and plot what a ring's processes recorded."""
