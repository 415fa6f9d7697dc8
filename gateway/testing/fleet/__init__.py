"""A fleet of gateways in numbers: pods as counters, clients as rows of arrays, disasters by a seed, and what must hold."""
