"""The interface for model authors: messages, sessions, adapters and a small library of models.

The names here keep their place. The API reference lists the other modules whose names do.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.adapt import spec_of
    from models.blocking import cancel_token
    from models.chat import ChatMessage, plain_template
    from models.errors import ModelError
    from models.formatters import Input, TextGenerationOutput, TextInput, input_formatter, output_formatter
    from models.messages import (
        Finish,
        FinishReason,
        InferRequest,
        InferResponse,
        Part,
        PartKind,
        Prompt,
        ResponseFormat,
        Tensor,
        Token,
        ToolCall,
        ToolSpec,
        TopToken,
    )
    from models.rolling import RollingBatch
    from models.session import Session
    from models.spec import Batching, ModelSpec, Shape, TensorSpec, declare

__all__ = [
    "Batching", "ChatMessage", "Finish", "FinishReason", "InferRequest", "InferResponse", "Input", "ModelError",
    "ModelSpec", "Part", "PartKind", "Prompt", "ResponseFormat", "RollingBatch", "Session", "Shape", "Tensor",
    "TensorSpec", "TextGenerationOutput", "TextInput", "Token", "ToolCall", "ToolSpec", "TopToken", "cancel_token",
    "declare", "input_formatter", "output_formatter", "plain_template", "spec_of",
]  # fmt: skip


_HOMES = {
    "models.adapt": ("spec_of",),
    "models.blocking": ("cancel_token",),
    "models.chat": ("ChatMessage", "plain_template"),
    "models.errors": ("ModelError",),
    "models.formatters": ("Input", "TextGenerationOutput", "TextInput", "input_formatter", "output_formatter"),
    "models.messages": (
        "Finish", "FinishReason", "InferRequest", "InferResponse", "Part", "PartKind", "Prompt", "ResponseFormat", "Tensor",
        "Token", "ToolCall", "ToolSpec", "TopToken",
    ),
    "models.rolling": ("RollingBatch",),
    "models.session": ("Session",),
    "models.spec": ("Batching", "ModelSpec", "Shape", "TensorSpec", "declare"),
}  # fmt: skip


def __getattr__(name: str) -> object:
    """Imports a name from its module when it is first used: `import models` alone imports nothing else."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
