"""One connection and its exchanges, whatever the wire, the dialect or the model. May import config, net and codecs."""
