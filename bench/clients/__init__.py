"""Other people's clients against a running server: two turns each, and what the second found."""
