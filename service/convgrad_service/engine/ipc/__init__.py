"""Messages between the hub, front ends and workers."""
