"""The tests of tools/sweep; where the tests are laid out without the tools, there is nothing to collect."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

collect_ignore_glob = []
if (ROOT / "tools" / "sweep").is_dir():
    sys.path.insert(0, str(ROOT))
else:
    collect_ignore_glob.append("test_*.py")
