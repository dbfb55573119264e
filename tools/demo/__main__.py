"""Runs the demo: `python -m tools.demo`, after `python -m tools.build` has built this machine's variant."""

import argparse
import platform
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
import transformers
from transformers import Gemma3ForCausalLM

from tools.demo import kernel as kernel_builds
from tools.demo import model as models
from tools.demo import timing
from tools.demo.report import fail, heading, line, step, table

ROOT = Path(__file__).resolve().parents[2]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.demo", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model (default: 4)")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to generate (default: 32)")
    parser.add_argument("--prefill", type=int, help="rows when prefilling (default: 4096 on CUDA, 256 on the CPU)")
    parser.add_argument("--quick", action="store_true", help="time less, and leave torch.compile out")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this torch sees no CUDA device")
    if args.layers < 1 or args.tokens < 1 or (args.prefill is not None and args.prefill < 1):
        parser.error("--layers, --tokens and --prefill must be at least 1")
    args.prefill = args.prefill or (4096 if args.device == "cuda" else 256)
    return args


def show_machine(args: argparse.Namespace) -> None:
    heading("Machine")
    line("Python, torch", f"{platform.python_version()}, {torch.__version__}; transformers {transformers.__version__}")
    if args.device == "cuda":
        line("device", torch.cuda.get_device_name())
    else:
        capability = torch.backends.cpu.get_cpu_capability()
        line("device", f"CPU, {torch.get_num_threads()} threads, torch uses {capability}")


def load_kernel() -> ModuleType:
    heading("Variant")
    start = time.perf_counter()
    try:
        kernel = kernel_builds.load(ROOT)
    except FileNotFoundError as error:
        fail(f"no build in {ROOT / 'build'} fits this machine; `make build` builds what it can.\n{error}")
    seconds = time.perf_counter() - start
    chosen = kernel_builds.loaded_variant(kernel)
    line("chosen", chosen)
    line("", f"id {kernel.__name__}, {kernel_builds.size_on_disk(kernel) / 2**20:.2f} MiB, loaded in {seconds:.2f} s")
    for name, built, refusal in kernel_builds.verdicts(ROOT):
        if name != chosen:
            name += " (built here)" if built else ""
            line("fits, not chosen" if refusal is None else "refused", f"{name}: {refusal}" if refusal else name)
    return kernel


def show_results(
    eager: Gemma3ForCausalLM, ours: Gemma3ForCausalLM, kernel: ModuleType, args: argparse.Namespace
) -> None:
    """Proves that the layers were replaced, then compares logits and greedy tokens."""
    heading("With and without the kernel")
    count, total, home = models.replaced(ours, kernel)
    line("layers replaced", f"{count} of {total}, by {home}" if count else f"0 of {total}")
    if count != total:
        fail("kernelize left layers as they were")

    ids = torch.randint(0, eager.config.vocab_size, (1, 64), device=args.device)
    with step("logits of a 64-token prompt: eager, ours, and eager in float64"):
        diff = models.compare_logits(eager, ours, ids)
    line("largest logit", f"{diff.largest_logit:.3g}")
    line("largest difference", f"ours to eager    {diff.ours_eager:.3g}{'' if diff.ours_eager else ', bit for bit'}")
    line("", f"eager to float64 {diff.eager_exact:.3g}   (what {args.dtype} costs without us)")
    line("", f"ours to float64  {diff.ours_exact:.3g}")

    with step(f"{args.tokens} greedy tokens, eager"):
        of_eager = models.generate(eager, ids, args.tokens)
    with step(f"{args.tokens} greedy tokens, ours"):
        of_ours = models.generate(ours, ids, args.tokens)
    if of_eager == of_ours:
        line("tokens", f"equal, all {args.tokens}: {' '.join(map(str, of_eager[:8]))} ...")
    else:
        at = next(i for i, pair in enumerate(zip(of_eager, of_ours, strict=True)) if pair[0] != pair[1])
        gap = models.lead(eager, ids, of_eager[:at])
        line("tokens", f"differ from token {at + 1} on, where eager's best logit leads its second by {gap:.3g}")


def compiled(function: Callable, *inputs: torch.Tensor) -> tuple[Callable | None, float | None]:
    """`function` compiled for the shapes of `inputs`, and the seconds that took; two Nones if torch.compile fails."""
    torch._dynamo.reset()
    result = torch.compile(function, dynamic=False)
    start = time.perf_counter()
    try:
        with torch.no_grad():
            result(*inputs)
    except Exception as error:  # any compiler or toolchain failure; the other columns still stand
        print(f" torch.compile failed: {str(error).strip().splitlines()[0]};", end="")
        return None, None
    return result, time.perf_counter() - start


def eager_geglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.gelu(gate, approximate="tanh") * up


def last_logits(model: Gemma3ForCausalLM) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda ids: model(ids, use_cache=False, logits_to_keep=1).logits


def measure(
    plain: Callable, fused: Callable, inputs: tuple[torch.Tensor, ...], args: argparse.Namespace
) -> tuple[dict[str, float], float | None]:
    """Median milliseconds of eager, torch.compile and ours, and the seconds of torch.compile's first call."""
    works, seconds = {"eager": lambda: plain(*inputs)}, None
    if not args.quick:
        fast, seconds = compiled(plain, *inputs)
        if fast is not None:
            works["torch.compile"] = lambda: fast(*inputs)
    works["ours"] = lambda: fused(*inputs)
    return timing.medians(works, args.device, seconds=0.5 if args.quick else 1.5), seconds


def show_times(
    eager: Gemma3ForCausalLM, ours: Gemma3ForCausalLM, kernel: ModuleType, args: argparse.Namespace
) -> None:
    """The table: the activation, the block and the whole model, at decode and prefill sizes."""
    heading("Time")
    busy = timing.others_busy()
    if busy > 0.1:
        print(f"Other programs use {busy:.0%} of this machine's cores: the times below are not to be trusted.")
    like = {"dtype": getattr(torch, args.dtype), "device": args.device}
    d, h, block, our_block = 1152, 6912, eager.model.layers[0].mlp, ours.model.layers[0].mlp
    rows = []
    for phase, m in (("decode", 1), ("prefill", args.prefill)):
        gate, up, x = torch.randn(m, h, **like), torch.randn(m, h, **like), torch.randn(m, d, **like)
        ids = torch.randint(0, eager.config.vocab_size, (1, m), device=args.device)
        for what, plain, fused, inputs in (
            (f"gelu(gate) * up, {m} x {h}", eager_geglu, kernel.geglu, (gate, up)),
            (f"MLP block, {m} x {d}", block, our_block, (x,)),
            (f"whole model, {m} token{'s' if m > 1 else ''}", last_logits(eager), last_logits(ours), (ids,)),
        ):
            name = f"{phase}: {what}"
            with step(name):
                times, seconds = measure(plain, fused, inputs, args)
            by_compile = f"{times['torch.compile']:.4g}" if "torch.compile" in times else "-"
            first_call = "-" if seconds is None else f"{seconds:.1f} s"
            ratio = f"{times['eager'] / times['ours']:.2f}"
            rows.append([name, f"{times['eager']:.4g}", by_compile, f"{times['ours']:.4g}", ratio, first_call])

    how = "CUDA events, launches included" if args.device == "cuda" else "wall clock"
    print(
        f"\nMedian milliseconds, {args.dtype}, {how}, taken in turn; the last column is torch.compile's first call.\n"
    )
    table(["", "eager", "torch.compile", "ours", "eager / ours", "compiled in"], rows)


def main() -> None:
    args = parse_arguments()
    show_machine(args)
    kernel = load_kernel()

    heading("Model")
    with step(f"Gemma 3, {args.layers} layers of 1152 -> 6912 -> 1152, random weights, {args.dtype}"):
        eager = models.build(args.layers, args.device, getattr(torch, args.dtype))
    with step("kernelize a copy of it"):
        ours = models.kernelized_copy(eager, ROOT, args.device)

    show_results(eager, ours, kernel, args)
    show_times(eager, ours, kernel, args)


if __name__ == "__main__":
    main()
