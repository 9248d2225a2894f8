"""Shared memory of clients, and tensors that are stored on the server."""
