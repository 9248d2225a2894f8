"""Shared memory of clients, and tensors stored on the server."""
