"""Models that no checkout has of its own."""
