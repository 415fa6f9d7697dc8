"""The limits of the models that are loaded at run time: their folders, their number, their memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from gateway.config import ModelConfig


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryLimits:
    """The folders that models may be loaded from, and how many models and bytes fit."""

    roots: tuple[str, ...] = ()
    """Folders that models may be in."""
    code_roots: tuple[str, ...] = ()
    """Folders whose model.py may run."""
    memory: int = 1024**3
    """Bytes that all models may need together."""
    models: int = 1000
    """The most models at once; models that are being loaded or unloaded count."""
    unload_timeout: float = 60.0
    """Seconds that running sessions have to end while their model is unloaded."""
    defaults: ModelConfig = field(default_factory=lambda: ModelConfig(factory=""))
    """The settings of a model that its folder does not set."""
