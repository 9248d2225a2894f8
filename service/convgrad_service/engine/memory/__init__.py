"""The arena, leases of its memory, and the layout of a request's tensors in a lease."""
