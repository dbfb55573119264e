"""Runs compilers in parallel: shows what is going on, and stops them all at the first failure or at Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from .toolchain import environment


class Progress:
    """One line for each finished step; on a terminal also a line, rewritten in place, of what is running now."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._lock = threading.Lock()
        self._running: dict[str, float] = {}
        self._shown = 0

    def say(self, line: str) -> None:
        with self._lock:
            self._erase()
            print(line, file=self._stream, flush=True)

    @contextmanager
    def step(self, label: str, finished: Callable[[float], str] | None = None) -> Iterator[None]:
        """Counts `label` as running; prints `finished(seconds)`, if there is something to print, when it succeeds."""
        start = time.monotonic()
        self._running[label] = start
        try:
            yield
        finally:
            self._running.pop(label, None)
        if finished:
            self.say(finished(time.monotonic() - start))

    @contextmanager
    def ticking(self) -> Iterator[None]:
        """Keeps the live line moving while the block runs."""
        if not self._live:
            yield
            return
        stop = threading.Event()
        ticker = threading.Thread(target=self._tick, args=(stop,), daemon=True)
        ticker.start()
        try:
            yield
        finally:
            stop.set()
            ticker.join()

    def _tick(self, stop: threading.Event) -> None:
        while not stop.wait(0.5):
            now = time.monotonic()
            line = ", ".join(f"{label} {now - start:.0f} s" for label, start in list(self._running.items()))
            width = os.get_terminal_size(self._stream.fileno()).columns - 1
            with self._lock:
                self._erase()
                self._stream.write(line[:width])
                self._stream.flush()
                self._shown = len(line[:width])
        with self._lock:
            self._erase()

    def _erase(self) -> None:
        if self._shown:
            self._stream.write("\r" + " " * self._shown + "\r")
            self._shown = 0


class Runner:
    """Child processes of one build. Each has a process group of its own: killing nvcc kills what it started."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self._children: set[subprocess.Popen] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def run(self, command: list[str], cwd: Path) -> subprocess.CompletedProcess:
        """Runs a command to its end; stdout and stderr come back as text, apart from each other."""
        with self._lock:
            if self._stopped:
                raise Stopped
            child = subprocess.Popen(
                command,
                cwd=cwd,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            self._children.add(child)
        try:
            stdout, stderr = child.communicate()
        except BaseException:  # Ctrl-C, where this is the main thread
            self.stop()
            raise
        finally:
            with self._lock:
                self._children.discard(child)
        if self._stopped:
            raise Stopped
        return subprocess.CompletedProcess(command, child.returncode, stdout, stderr)

    def each(self, function: Callable, items: Iterable) -> list:
        """function(item) for every item, `jobs` at a time; results in order. The first exception stops the rest."""
        with ThreadPoolExecutor(self.jobs) as pool:
            futures = [pool.submit(function, item) for item in items]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            except BaseException:  # Ctrl-C in the main thread
                self.stop()
                raise
            failed = [future for future in futures if future.done() and future.exception() is not None]
            if failed:
                self.stop()
        for future in failed:
            if not isinstance(future.exception(), Stopped):
                raise future.exception()
        return [future.result() for future in futures]

    def stop(self) -> None:
        """Kills every child and refuses new ones."""
        with self._lock:
            self._stopped = True
            for child in self._children:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)


class Stopped(Exception):
    """A step given up because another one failed or the user pressed Ctrl-C."""
