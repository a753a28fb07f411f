"""When effects happen, predicted or measured, and what that says. No torch."""
