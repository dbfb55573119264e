"""The Hub card: CARD.md, a template in the dialect of kernel-builder's, with the package's own facts.

kernel-builder fills the same template, without `signatures`, `variants` and `numbers`: they may be absent.
"""

from __future__ import annotations

import re
from pathlib import Path

import jinja2

from ..build.config import Package
from .api import Api


def fill_card(template: Path, package: Package, repo_id: str, api: Api, variants: tuple[str, ...], bench: bool) -> str:
    """The text of the Hub's README.md.

    Raises jinja2.TemplateError for a template that asks for what there is not, OSError for a file that is missing, and
    ValueError for a README.md without numbers.
    """
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        repo_id=repo_id,
        license=package.license,
        version=package.version,
        functions=[name for name in api.functions if name != "layers"],
        signatures={name: f"{name}({', '.join(arguments)})" for name, arguments in api.functions.items()},
        layers=list(api.layers),
        variants=variants,
        numbers=_numbers(package.root / "README.md"),
        has_benchmark=bench,
        upstream=package.upstream,
        source=package.source,
    )


def _numbers(readme: Path) -> str:
    """README's section on them. Its links lead into the project, which the Hub has not: their texts stay."""
    section = re.search(r"^## Numbers\n+(.*?)\s*^## ", readme.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    if section is None:
        raise ValueError(f"{readme.name} has no section 'Numbers'")
    return re.sub(r"\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", section[1])
