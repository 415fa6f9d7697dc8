"""OpenAI's API for chat completions and completions, as its clients call it: all public names."""

from protocols.openai.answer import Top
from protocols.openai.chat import ChatEncoder, ChatForm
from protocols.openai.completions import CompletionEncoder
from protocols.openai.conversation import Call, MediaPart, Message, MessagePart, Role, TextPart, Tool
from protocols.openai.errors import OpenAIError
from protocols.openai.models import model_body, models_body
from protocols.openai.request import ChatRequest, CompletionRequest, model_of, parse_chat, parse_completion

__all__ = [
    "Call",
    "ChatEncoder",
    "ChatForm",
    "ChatRequest",
    "CompletionEncoder",
    "CompletionRequest",
    "MediaPart",
    "Message",
    "MessagePart",
    "OpenAIError",
    "Role",
    "TextPart",
    "Tool",
    "Top",
    "model_body",
    "model_of",
    "models_body",
    "parse_chat",
    "parse_completion",
]
