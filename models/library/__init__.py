"""Small models without tricks, used by the demo, the docs and the tests."""
