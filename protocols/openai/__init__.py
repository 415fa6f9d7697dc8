"""OpenAI's API for chat completions and completions, as its clients call it: all public names."""

from protocols.openai.errors import OpenAIError
from protocols.openai.request import ChatRequest, CompletionRequest, Message, Role, model_of, parse_chat, parse_completion
from protocols.openai.response import ChatEncoder, ChatForm, CompletionEncoder, Top, model_body, models_body

__all__ = [
    "ChatEncoder",
    "ChatForm",
    "ChatRequest",
    "CompletionEncoder",
    "CompletionRequest",
    "Message",
    "OpenAIError",
    "Role",
    "Top",
    "model_body",
    "model_of",
    "models_body",
    "parse_chat",
    "parse_completion",
]
