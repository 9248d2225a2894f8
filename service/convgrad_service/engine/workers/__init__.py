"""What computes: a process, a thread or the event loop itself, and what keeps processes alive."""
