"""SageMaker: routes of its runtime and its containers, its signatures. May import what dialects may, and text and v2."""
