"""AWS: event streams, signatures, and the APIs of SageMaker's runtime and containers."""
