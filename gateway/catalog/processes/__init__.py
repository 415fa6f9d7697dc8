"""The calls of models that run in processes: of this gateway's own processes, and of those that several fronts share."""
