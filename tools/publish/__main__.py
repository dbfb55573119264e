"""The command line: python -m tools.publish [--repo-id org/geglu] [--yes]

Without --yes nothing is changed: it prints what would be. Exit code 0; 1 and one line on the standard error when it
cannot or may not be published.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from huggingface_hub import HfApi, get_token

from .errors import PublishError
from .plan import Branch, Plan, make_plan, size_of
from .remote import Remote
from .source import Source, collect

_MEGABYTE = 1e6


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    try:
        return _publish(options)
    except PublishError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: a branch has all of its commit or none of it; run this again to go on", file=sys.stderr)
        return 130


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.publish", description="Publish the built variants.")
    parser.add_argument("--repo-id", metavar="ORG/NAME", help="default: [general.hub] repo-id of build.toml")
    parser.add_argument("--root", type=Path, default=Path(), help="the directory of build.toml; default: this one")
    parser.add_argument("--yes", action="store_true", help="publish; without it only the plan is printed")
    return parser.parse_args(arguments)


def _publish(options: argparse.Namespace) -> int:
    source = collect(options.root.resolve(), options.repo_id)
    if get_token() is None:
        raise PublishError("there is no token for the Hub: run `hf auth login`, or set HF_TOKEN")
    remote = Remote(source.repo_id, HfApi(library_name="geglu-publish"))
    plan = make_plan(source, remote)
    _print_plan(plan, source, remote)
    if plan.is_empty:
        print("nothing to publish: the Hub has all of it")
        return 0
    if not options.yes:
        print("dry run: nothing was changed; add --yes to publish")
        return 0
    if not remote.exists:
        print(f"creating {source.repo_id}", flush=True)
        remote.create()
        plan = make_plan(source, remote)
    for number, branch in enumerate(plan.branches, start=1):
        step = f"[{number}/{len(plan.branches)}] {branch.name}"
        if branch.is_empty:
            print(f"{step}: up to date")
            continue
        print(f"{step}: {len(branch.writes)} files, {branch.size / _MEGABYTE:.2f} MB ...", flush=True)
        remote.commit(branch, f"geglu {source.package.version}, commit {source.commit[:12]}")
        print(f"{step}: published")
    return 0


def _print_plan(plan: Plan, source: Source, remote: Remote) -> None:
    print(f"{remote.repo_id}, commit {source.commit[:12]}: {plan.version_reason}")
    for variant in source.variants:
        size = sum(size_of(path) for name, path in source.build.items() if name.split("/")[1] == variant)
        print(f"  {variant}: {size / _MEGABYTE:.2f} MB, all checks passed")
    total = sum(map(size_of, source.build.values()))
    print(f"  together {total / _MEGABYTE:.2f} MB")
    for branch in plan.branches:
        _print_branch(branch)
        deleted = {path.split("/")[1] for path in branch.deletes if path.startswith("build/")}
        for variant in sorted(deleted.difference(source.variants)):
            print(f"  {variant} is not in build/: {branch.name} loses it")


def _print_branch(branch: Branch) -> None:
    state = "new branch" if branch.head is None else f"at {branch.head[:12]}"
    print(
        f"branch {branch.name} ({state}): {len(branch.writes)} files to write ({branch.size / _MEGABYTE:.2f} MB), "
        f"{len(branch.deletes)} to delete, {branch.unchanged} unchanged"
    )
    for path, sign in (*((path, "+") for path in branch.writes), *((path, "-") for path in branch.deletes)):
        print(f"  {sign} {path}")


if __name__ == "__main__":
    sys.exit(main())
