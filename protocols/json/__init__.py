"""JSON of untrusted peers: the text without its values (`text`), strict reading (`strict`), one text a line (`lines`)."""
