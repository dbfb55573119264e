"""The one exception that the builder expects to show to its user."""


class BuildError(Exception):
    """A build that cannot go on. The message names the file or tool, what was found, what was expected and the fix."""
