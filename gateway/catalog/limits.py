"""From where models may be loaded at run time, and how much of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from gateway.config import ModelConfig


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryLimits:
    """From where models may be loaded, and how much of them."""

    roots: tuple[str, ...] = ()
    """Folders that models may be in."""
    code_roots: tuple[str, ...] = ()
    """Folders whose model.py may run."""
    memory: int = 1024**3
    """Bytes that all models may need together."""
    models: int = 1000
    """Models at once, those included that are on their way in or out."""
    unload_timeout: float = 60.0
    """Seconds that sessions under way may go on while their model is unloaded."""
    defaults: ModelConfig = field(default_factory=lambda: ModelConfig(factory=""))
    """How a model is served where its folder does not say."""
