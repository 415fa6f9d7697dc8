"""SageMaker: its runtime's routes, its containers' routes, its signatures. May import the text dialects and v2's."""
