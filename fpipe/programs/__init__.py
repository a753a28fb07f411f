"""Lower a schedule's compute order to complete programs, and verify them. No torch."""
