"""What is computed next and where, in how many parts, and what one key may use."""
