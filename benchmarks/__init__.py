"""What the performance page quotes: programs anyone can run."""
