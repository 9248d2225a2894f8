"""API keys and scopes: who may call what, and with which limits."""
