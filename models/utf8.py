"""The UTF-8 of a text that may not have one."""


def utf8(text: str) -> bytes:
    """The text's UTF-8 bytes; half of a surrogate pair, which is no character, becomes U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
