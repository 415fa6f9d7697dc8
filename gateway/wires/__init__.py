"""Transport drivers: a machine and a socket become exchanges. May import core, net and config."""
