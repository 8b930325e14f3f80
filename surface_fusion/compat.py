"""placeholder"""


def apply() -> None:
    pass
