"""A text model without weights: it shows tools, formats and thinking, or follows a script."""

from models.library.scripted.model import Scripted

__all__ = [
    "Scripted",
]  # fmt: skip
