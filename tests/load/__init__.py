"""Load: what clients send, how a server takes it, and where it stops. `make load` runs it."""
