"""Who may call, and with which limits."""
