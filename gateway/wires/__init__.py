"""Transport drivers: a machine and a socket become exchanges."""
