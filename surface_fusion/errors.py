"""The exception for user errors, and a function that shortens text in its messages."""


class SurfaceFusionError(ValueError):
    """A user error: one line that says what was wrong, with the value, and what to do.

    ``surface-fusion`` prints the line and exits with status 2; under plain ``fairseq-*``
    commands the same line is the text of the exception.
    """


def shorten(text: str, length: int) -> str:
    """The first *length* characters of *text* and an ellipsis, or *text* if it is not longer."""
    return text if len(text) <= length else f"{text[:length]} ..."
