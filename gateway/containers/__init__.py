"""A user's model container, served as a model. May import client, catalog, core, net, telemetry and config."""
