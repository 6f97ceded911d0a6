"""The error that scripts show as one line instead of a traceback."""


class InputError(ValueError):
    """A mistake in flags, files or data that the user can fix.

    Its message names the rule, the value and the way out. Any other exception is a bug and keeps its traceback.

    >>> raise InputError("--num_seeds must be at least 1, not 0")
    """
