"""Pure conversions between requests and the messages of models, both ways. May import the ground alone."""
