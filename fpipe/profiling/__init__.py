"""What a run took: observers that record it, and stages measured as costs."""
