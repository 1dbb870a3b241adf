"""The one exception that means "the user can mend this": printed as one line, exit status 2."""


class UserError(ValueError):
    """A user's mistake. The message names the thing, says what was found and what was expected."""
