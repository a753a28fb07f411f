"""From a schedule's compute order to complete programs, and whether they are right. No torch."""
