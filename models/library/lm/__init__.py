"""Language models of the library: n-grams, and a small network."""

from models.library.lm.model import LanguageModel

__all__ = [
    "LanguageModel",
]  # fmt: skip
