"""Composes protocols and models: listeners, exchanges, dialects, workers."""
