"""The TGI form of LMI's answers (`option.tgi_compat`): its tokens, events, details and failures, as bytes of JSON.

It is LMI's form and Text Generation Inference's at once: what either has is here, under TGI's names where both have it
under two. The types are those that the clients text-generation and huggingface_hub declare (TGI: router/src/lib.rs).
"""

from __future__ import annotations

from typing import final

from protocols.lmi.errors import ErrorType, json_string, tgi_error_body

_TOKEN = b'{"id": %d, "text": %b, "logprob": %b, "special": %b}'
# TGI's PrefillToken has no `special`, and nobody says of a token of the prompt whether it is.
_PROMPT_TOKEN = b'{"id": %d, "text": %b, "logprob": %b}'


@final
class TGIForm:
    """How `TextEncoder` writes an answer in TGI's form. Texts come as JSON strings, probabilities as JSON numbers."""

    opening, closing = b"[", b"]"
    """Around a document, which is an array of one."""
    absent_details = b', "details": null'
    """On the last event of a stream that has none."""
    event_end = b', "generated_text": null, "details": null}'
    """Completes what `event` begins, unless the event is the last."""
    empty_prefill = True
    """A document's details have `prefill` though nobody asked for it: text-generation refuses those that do not."""

    def token(self, id: int, text: bytes, log_prob: bytes, special: bool) -> bytes:
        return _TOKEN % (id, text, log_prob, b"true" if special else b"false")

    def last(self, text: bytes) -> bytes:
        """The token of an event that no token of the model's has: special, unless it brings a text that was held back."""
        return _TOKEN % (0, text, b"0.0", b"true" if text == b'""' else b"false")

    def prompt_token(self, id: int, text: bytes, log_prob: bytes) -> bytes:
        return _PROMPT_TOKEN % (id, text, log_prob)

    def event(self, index: int, token: bytes, top: bytes) -> bytes:
        """The object of event number `index`, from 1, open. `top` are its most probable tokens, as an array: the key is
        left out where there are none."""
        if top in (b"", b"[]"):
            return b'{"index": %d, "token": %b' % (index, token)
        return b'{"index": %d, "token": %b, "top_tokens": %b' % (index, token, top)

    def facts(self, seed: int | None, prompt_tokens: int, streaming: bool) -> bytes:
        """What the details say after LMI's first two. `input_length`, of streams alone, is null where the model has not
        reported the prompt's tokens: huggingface_hub takes null, text-generation does not look at it."""
        said = b', "seed": null' if seed is None else b', "seed": %d' % seed
        if not streaming:
            return said
        return said + (b', "input_length": %d' % prompt_tokens if prompt_tokens else b', "input_length": null')

    def failure(self, message: str, kind: ErrorType) -> bytes:
        """The object that ends a stream, for which both clients raise the exception that `kind` names."""
        return b'{"error":%b,"error_type":"%b"}' % (json_string(message), kind.encode())

    def failure_body(self, message: str, kind: ErrorType) -> bytes:
        return tgi_error_body(message, kind)
