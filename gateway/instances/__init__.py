"""The processes that a model may run in, outside the gateway's. May import net and codecs."""
