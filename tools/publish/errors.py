"""The one error that publishing stops with."""


class PublishError(Exception):
    """Why nothing is published: one sentence that names what is wrong and what to do. Nothing was changed."""
