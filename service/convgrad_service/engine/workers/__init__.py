"""Workers, which compute jobs in a process, a thread or on the event loop, and their supervisor."""
