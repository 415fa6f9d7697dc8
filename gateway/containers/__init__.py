"""A user's model container, shown as a model. May import client, catalog, core, net, telemetry and config."""
