"""Text of others, models and data among them, as it may be shown on a terminal."""

_HARMLESS = "\n\t"


def printable(text: str) -> str:
    """Replace control characters, which could steer the terminal, by U+FFFD; line ends and tabs stay."""
    if text.isprintable():
        return text
    return "".join("\ufffd" if (ord(c) < 32 or 127 <= ord(c) < 160) and c not in _HARMLESS else c for c in text)
