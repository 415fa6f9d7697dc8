"""A whole gateway under one seed: clients, models and a network with faults, and the promises checked at every step."""
