"""Smoke benchmark for `kernels benchmark ./`: this kernel against eager torch, by the runner's wall clock.

The runner compares with an absolute tolerance of 1e-2. So values are drawn from ranges in which one bf16 rounding step
of the gelu moves no result by that much: gate in [-4, 4], up in [-0.3, 0.3], incoming gradients in [-0.2, 0.2].
"""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark

GATE_RANGE, UP_RANGE, GRAD_RANGE = 4.0, 0.3, 0.2


def uniform(rows: int, cols: int, limit: float, device: str) -> torch.Tensor:
    """(rows, cols) bf16 values in [-limit, limit]."""
    return torch.empty(rows, cols, device=device).uniform_(-limit, limit).to(torch.bfloat16)


def eager_geglu(gate: torch.Tensor, up: torch.Tensor, approximate: str) -> torch.Tensor:
    return F.gelu(gate, approximate=approximate) * up


class Halves:
    """Inputs of all benchmarks here. No Benchmark itself: the runner would look for workloads in it."""

    def make_halves(self) -> None:
        """gate, up: (8192, 3072) on a GPU, (1024, 3072) on the CPU, where eager is a hundred times slower."""
        rows, cols = (1024 if self.device == "cpu" else 8192), 3072
        self.gate = uniform(rows, cols, GATE_RANGE, self.device)
        self.up = uniform(rows, cols, UP_RANGE, self.device)

    def make_packed(self) -> None:
        """x: gate and up side by side; gate and up become its two halves."""
        self.make_halves()
        self.x = torch.cat((self.gate, self.up), dim=-1)
        self.gate, self.up = self.x.chunk(2, dim=-1)


class Geglu(Halves, Benchmark):
    seed = 42

    def setup(self) -> None:
        self.make_halves()

    def benchmark_tanh(self) -> None:
        self.out = self.kernel.geglu(self.gate, self.up, approximate="tanh")

    def verify_tanh(self) -> torch.Tensor:
        return eager_geglu(self.gate, self.up, "tanh")

    def benchmark_exact(self) -> None:
        self.out = self.kernel.geglu(self.gate, self.up, approximate="none")

    def verify_exact(self) -> torch.Tensor:
        return eager_geglu(self.gate, self.up, "none")


class GegluPacked(Halves, Benchmark):
    seed = 42

    def setup(self) -> None:
        self.make_packed()

    def benchmark_packed_tanh(self) -> None:
        self.out = self.kernel.geglu_packed(self.x, approximate="tanh")

    def verify_packed_tanh(self) -> torch.Tensor:
        return eager_geglu(self.gate, self.up, "tanh")


class GeluTanhAndMul(Halves, Benchmark):
    seed = 42

    def setup(self) -> None:
        self.make_packed()
        self.out = torch.full_like(self.gate, float("nan"), memory_format=torch.contiguous_format)

    def benchmark_into_out(self) -> None:
        self.kernel.gelu_tanh_and_mul(self.out, self.x)

    def verify_into_out(self) -> torch.Tensor:
        return eager_geglu(self.gate, self.up, "tanh")


class GegluPackedBackward(Halves, Benchmark):
    """The backward alone, on a graph that is kept. Packed, so that one tensor holds both gradients."""

    seed = 42

    def setup(self) -> None:
        self.make_packed()
        self.x.requires_grad_()
        self.grad = uniform(*self.gate.shape, GRAD_RANGE, self.device)
        self.result = self.kernel.geglu_packed(self.x, approximate="tanh")
        self.eager_result = eager_geglu(*self.x.chunk(2, dim=-1), "tanh")

    def benchmark_backward(self) -> None:
        (self.out,) = torch.autograd.grad(self.result, self.x, self.grad, retain_graph=True)

    def verify_backward(self) -> torch.Tensor:
        (reference,) = torch.autograd.grad(self.eager_result, self.x, self.grad, retain_graph=True)
        return reference
