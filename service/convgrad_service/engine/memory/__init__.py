"""The arena, who holds which part of it, and where each tensor of a request lies."""
