"""Simulate a fleet of gateways: pods as counters, clients as arrays, seeded disasters, and the promises checked in each."""
