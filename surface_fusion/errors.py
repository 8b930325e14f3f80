"""The exception for user errors."""


class SurfaceFusionError(ValueError):
    """A user error: one line that says what was wrong, with the value, and what to do.

    ``surface-fusion`` prints the line and exits with status 2; under plain ``fairseq-*``
    commands the same line is the text of the exception.
    """
