"""How the hub, front ends and workers talk to each other."""
