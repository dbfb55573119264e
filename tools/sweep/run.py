"""One run: participants, ceilings, cases, probes, report."""

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from . import ceilings, environment, linear, plot, probes, report, suites, timing
from .measure import Lab, measure
from .model import FAILED, Case, Row, row_values

_BUDGET_SECONDS = {"cuda": 1.0, "cpu": 3.0}


def run(options: argparse.Namespace) -> int:
    """Run what `options` asks for; returns the exit code."""
    if options.threads:
        torch.set_num_threads(options.threads)
    repo = options.repo.resolve()
    try:
        device = environment.pick_device(options.device)
        suite = _suite(options, device)
        peers = environment.load_peers(repo, device, not options.no_compile)
    except (RuntimeError, ValueError, OSError, ImportError) as error:
        print(f"sweep: {error}", file=sys.stderr)
        return 2
    _progress("ceilings")
    start = ceilings.measure(device)
    found = report.Report(environment.facts(peers.kernel, device), start)
    for name in dict.fromkeys(name for case in suite.cases for name in case.providers):
        if name in peers.absent:
            _progress(f"without {name}: {peers.absent[name]}")
    lab = Lab(device, peers, options.budget or _BUDGET_SECONDS[device.type])
    if device.type == "cuda":
        lab.flush = timing.make_flush(device)
    for index, case in enumerate(suite.cases, start=1):
        _progress(f"[{index}/{len(suite.cases)}] {case.label}")
        found.rows += _rows(case, lab, found)

    def ceilings_again() -> dict[str, float]:
        end = ceilings.measure(device)
        found.ceilings = start.best(end)
        return report.drift_values(start, end)

    _attempt(found, "ceilings at the end", ceilings_again)
    found.values |= row_values(found.rows, found.ceilings)
    found.bars += suite.bars
    for case in suite.memory:
        _attempt(found, f"peak memory: {case.label}", partial(linear.peak_memory, peers.kernel, device, case))
    if suite.probes:
        _probe(found, peers.kernel, device, repo)
    _finish(found, options.out)
    return 1 if any(row.status == FAILED for row in found.rows) else 0


def _suite(options: argparse.Namespace, device: torch.device) -> suites.Suite:
    modes = options.mode or (["event"] if device.type == "cuda" else ["wall"])
    if not options.rows:
        return suites.SUITES[options.suite or "quick"](device.type)
    for mode in modes:
        if (mode == "wall") != (device.type == "cpu"):
            raise ValueError(f"mode: {mode} is not for {device.type}: wall is for the CPU, the others are for a GPU")
    return suites.free(options.rows, options.cols, options.dtype, options.form, options.op, modes)


def _rows(case: Case, lab: Lab, found: report.Report) -> list[Row]:
    try:
        rows = measure(case, lab)
    except Exception as error:  # out of memory, a launch that broke the context: keep what was measured so far
        found.problems.append(f"{case.label}: {type(error).__name__}: {error}")
        rows = [Row(case, name, FAILED, note=type(error).__name__) for name in case.providers]
    if lab.device.type == "cuda":
        _release()
    return rows


def _release() -> None:
    try:
        torch.cuda.empty_cache()
    except RuntimeError:  # the context is lost; the failed case has been recorded already
        _progress("the GPU no longer answers")


def _attempt(found: report.Report, name: str, probe: Callable[[], dict[str, float]]) -> None:
    _progress(name)
    try:
        found.values |= probe()
    except Exception as error:  # a probe that cannot run leaves its bars without a value
        found.problems.append(f"{name}: {type(error).__name__}: {error}")


def _probe(found: report.Report, kernel, device: torch.device, repo: Path) -> None:
    _attempt(found, "accuracy", lambda: probes.accuracy(kernel, device))
    _attempt(found, "start-up in a fresh process", lambda: probes.startup(repo, device))
    for variant, megabytes in probes.sizes(repo).items():
        found.values[f"size: {variant}"] = megabytes
        found.bars.append(suites.size_bar(variant))


def _finish(found: report.Report, folder: Path) -> None:
    for name, value in found.facts.items():
        print(f"{name}: {value}")
    print("\n".join(report.ceiling_lines(found)) + "\n")
    print(report.aligned(report.table(found)))
    if found.bars:
        print("\n" + report.aligned(report.bar_table(found)))
        verdicts = Counter(bar.verdict(found.values) for bar in found.bars)
        print("\nbars: " + ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items())))
    for problem in found.problems:
        print(f"could not run: {problem}")
    report.save(found, folder)
    print(f"\nwritten: {folder}/sweep.md, {folder}/sweep.json")
    print(_plot(found, folder))


def _plot(found: report.Report, folder: Path) -> str:
    try:
        return plot.save(found, folder)
    except Exception as error:  # the numbers are written already; a plotting library must not fail the run
        return f"no plot: {type(error).__name__}: {error}"


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
