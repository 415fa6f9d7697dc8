"""The TGI form of LMI's answers (`option.tgi_compat`): its tokens, events, details and failures, as bytes of JSON.

It is a union of LMI's form and Text Generation Inference's: all keys of both, under TGI's names if the two differ. The
types are those that the clients text-generation and huggingface_hub declare (TGI: router/src/lib.rs).
"""

from __future__ import annotations

from typing import final

from protocols.lmi.errors import ErrorType, json_string, tgi_error_body

_TOKEN = b'{"id": %d, "text": %b, "logprob": %b, "special": %b}'
# TGI's PrefillToken has no `special`, and no model reports it for tokens of the prompt.
_PROMPT_TOKEN = b'{"id": %d, "text": %b, "logprob": %b}'


@final
class TGIForm:
    """The form of TGI for `TextEncoder`. Texts are passed as JSON strings, probabilities as JSON numbers."""

    opening, closing = b"[", b"]"
    """The bytes around a document, which is an array of one object."""
    absent_details = b', "details": null'
    """The details on the last event of a stream that has none."""
    event_end = b', "generated_text": null, "details": null}'
    """Completes the bytes of `event`, unless the event is the last."""
    empty_prefill = True
    """True: a document's details have `prefill` even if it was not requested, because text-generation requires it."""

    def token(self, id: int, text: bytes, log_prob: bytes, special: bool) -> bytes:
        return _TOKEN % (id, text, log_prob, b"true" if special else b"false")

    def last(self, text: bytes) -> bytes:
        """The token of an event that belongs to no token of the model: special, unless it has a text that was held back."""
        return _TOKEN % (0, text, b"0.0", b"true" if text == b'""' else b"false")

    def prompt_token(self, id: int, text: bytes, log_prob: bytes) -> bytes:
        return _PROMPT_TOKEN % (id, text, log_prob)

    def event(self, index: int, token: bytes, top: bytes) -> bytes:
        """The object of event number `index`, from 1, without its closing brace. `top` is the array of its most probable
        tokens; its key is left out if there are none."""
        if top in (b"", b"[]"):
            return b'{"index": %d, "token": %b' % (index, token)
        return b'{"index": %d, "token": %b, "top_tokens": %b' % (index, token, top)

    def facts(self, seed: int | None, prompt_tokens: int, streaming: bool) -> bytes:
        """The details after LMI's first two. `input_length` is for streams alone. It is null if the model has not reported
        the prompt's tokens: huggingface_hub accepts null, and text-generation does not read it."""
        said = b', "seed": null' if seed is None else b', "seed": %d' % seed
        if not streaming:
            return said
        return said + (b', "input_length": %d' % prompt_tokens if prompt_tokens else b', "input_length": null')

    def failure(self, message: str, kind: ErrorType) -> bytes:
        """The object that ends a stream. Both clients raise the exception that `kind` names."""
        return b'{"error":%b,"error_type":"%b"}' % (json_string(message), kind.encode())

    def failure_body(self, message: str, kind: ErrorType) -> bytes:
        return tgi_error_body(message, kind)
