"""Calls models that run in processes: in the gateway's own processes, and in those that several fronts share."""
