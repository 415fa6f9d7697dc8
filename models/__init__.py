"""What a model author sees: messages, sessions, adapters and a small library of models."""
