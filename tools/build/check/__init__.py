"""What must hold of a variant directory, whoever built it: `check_variant(directory)` lists what does not.

python -m tools.build.check [build/<variant> ...]
"""

from .variant import check_variant

__all__ = ["check_variant"]
