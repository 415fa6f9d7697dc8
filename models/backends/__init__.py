"""Backends for models of other libraries. Each imports its library when a model is loaded, and names the needed extra."""
