"""Between requests and the messages of models, both ways, pure. May import the ground alone."""
