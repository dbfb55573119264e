"""The Hub card: CARD.md, a template in the dialect of kernel-builder's, with the package's own facts."""

from __future__ import annotations

from pathlib import Path

import jinja2

from ..build.config import Package
from .api import Api


def fill_card(template: Path, package: Package, repo_id: str, api: Api, variants: tuple[str, ...], bench: bool) -> str:
    """The text of README.md. Raises jinja2.TemplateError for a template that asks for what there is not."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        repo_id=repo_id,
        license=package.license,
        version=package.version,
        functions=[name for name in api.functions if name != "layers"],
        layers=list(api.layers),
        variants=variants,
        has_benchmark=bench,
        upstream=package.upstream,
        source=package.source,
    )
