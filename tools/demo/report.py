"""What the demo prints: headings, progress and one table."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


def heading(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


def line(label: str, value: object) -> None:
    print(f"{label:<24}{value}", flush=True)


@contextmanager
def step(text: str) -> Iterator[None]:
    """Announces work that may take longer than a second, and how long it took."""
    print(f"... {text}", end="", flush=True)
    start = time.perf_counter()
    try:
        yield
    except BaseException:
        print(" failed", flush=True)
        raise
    print(f" ({time.perf_counter() - start:.1f} s)", flush=True)


def table(header: list[str], rows: list[list[str]]) -> None:
    """Prints `rows` under `header`, the first column flush left and the others flush right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, ["-" * width for width in widths], *rows]:
        numbers = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *numbers]), flush=True)


def fail(message: str) -> None:
    """Ends the demo with `message` on stderr and exit status 1."""
    sys.stdout.flush()
    sys.exit(f"error: {message}")
