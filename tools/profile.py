"""Runs one call of the kernel under Nsight Compute and prints what it moved, how fast, and with how many registers.

`python -m tools.profile --op geglu --rows 8192 --columns 14336` needs an NVIDIA GPU, a CUDA build of torch, a built
CUDA variant and `ncu`. The first call goes unprofiled; ncu then measures the launches of the second, with cold caches.
"""

import argparse
import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]

# Tensors of rows x columns that a call has to read or write once, which is what its time is judged by.
TENSORS = {"geglu": 3, "geglu_packed": 3, "backward": 5}

# In base units: nanoseconds, bytes, registers of a thread, percent.
METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "launch__registers_per_thread",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.profile", description=__doc__.splitlines()[0])
    parser.add_argument("--op", choices=list(TENSORS), default="geglu")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--columns", type=int, default=14336, help="width of gate and of up (default: 14336)")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32", "float64"], default="bfloat16")
    parser.add_argument("--approximate", choices=["tanh", "none"], default="tanh")
    parser.add_argument("--inside-ncu", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def call_once(args: argparse.Namespace) -> None:
    """The work that ncu watches: one call between the profiler's start and stop, after one to load the code."""
    from kernels import get_kernel

    os.environ["LOCAL_KERNELS"] = f"org/geglu={ROOT}"
    kernel = get_kernel("org/geglu", version=1)
    like = {"dtype": getattr(torch, args.dtype), "device": "cuda", "requires_grad": args.op == "backward"}
    if args.op == "geglu_packed":
        inputs, op = [torch.randn(args.rows, 2 * args.columns, **like)], kernel.geglu_packed
    else:
        inputs, op = [torch.randn(args.rows, args.columns, **like) for _ in range(2)], kernel.geglu
    for profiled in (False, True):
        out = op(*inputs, approximate=args.approximate)
        grad = torch.randn_like(out)
        torch.cuda.synchronize()
        if profiled:
            torch.cuda.profiler.start()
        if args.op == "backward":
            torch.autograd.grad(out, inputs, grad)
        else:
            op(*inputs, approximate=args.approximate)
        torch.cuda.synchronize()
        if profiled:
            torch.cuda.profiler.stop()


def launches(report: str) -> list[dict[str, str | float]]:
    """The launches in ncu's CSV `report` in order, each as {"kernel": name, metric: value in base units}."""
    # ncu writes its own messages, each with a leading ==, into the same stream.
    lines = [line for line in report.splitlines() if line.startswith('"')]
    found: dict[str, dict[str, str | float]] = {}
    for row in csv.DictReader(lines):
        if row["Metric Name"] in METRICS:
            launch = found.setdefault(row["ID"], {"kernel": row["Kernel Name"]})
            launch[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
    return list(found.values())


def profile(ncu: str, args: argparse.Namespace) -> list[dict[str, str | float]]:
    """Runs this script once more under `ncu` and returns the launches it saw."""
    command = [ncu, "--csv", "--print-units", "base", "--profile-from-start", "off", "--target-processes", "all"]
    command += ["--metrics", ",".join(METRICS), sys.executable, "-m", "tools.profile", "--inside-ncu"]
    for name in ("op", "rows", "columns", "dtype", "approximate"):
        command += [f"--{name}", str(getattr(args, name))]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = launches(result.stdout) if result.returncode == 0 else []
    if not found:
        sys.exit(f"error: ncu reported no launch (exit status {result.returncode})\n{result.stdout}{result.stderr}")
    return found


def main() -> None:
    args = parse_arguments()
    if args.inside_ncu:
        call_once(args)
        return
    if not torch.cuda.is_available():
        sys.exit(f"error: profiling needs a CUDA device, and torch {torch.__version__} sees none")
    ncu = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")
    if ncu is None:
        sys.exit(
            "error: ncu (Nsight Compute) was found neither in PATH nor in /usr/local/cuda/bin; the CUDA toolkit has it"
        )

    print(f"{torch.cuda.get_device_name()}: {args.op}, {args.rows} x {args.columns}, {args.dtype}, {args.approximate}")
    needed = TENSORS[args.op] * args.rows * args.columns * getattr(torch, args.dtype).itemsize
    print(f"bytes that have to move  {needed:,}")
    for launch in profile(ncu, args):
        nanoseconds = launch["gpu__time_duration.sum"]
        read, written = launch["dram__bytes_read.sum"], launch["dram__bytes_write.sum"]
        print(f"\n{launch['kernel']}")
        print(f"  time                   {nanoseconds / 1e3:,.2f} us")
        print(f"  DRAM traffic           {read:,.0f} bytes read, {written:,.0f} written")
        print(f"  achieved bandwidth     {needed / nanoseconds:,.1f} GB/s of the bytes that have to move")
        print(f"  registers              {launch['launch__registers_per_thread']:.0f} a thread")
        print(
            f"  active warps           {launch['sm__warps_active.avg.pct_of_peak_sustained_active']:.1f} % of the most"
        )


if __name__ == "__main__":
    main()
