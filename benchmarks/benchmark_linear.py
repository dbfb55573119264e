"""Smoke benchmark of `linear` for `kernels benchmark ./`: bias and GELU in the matrix product against eager torch.

The runner compares with an absolute tolerance of 1e-2, so the weights are small enough that results stay below 1,
where two bf16 rounding steps are less than that.
"""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark

K, N = 768, 3072


def uniform(*shape: int, limit: float, device: str) -> torch.Tensor:
    """bf16 values in [-limit, limit]."""
    return torch.empty(*shape, device=device).uniform_(-limit, limit).to(torch.bfloat16)


class Linear(Benchmark):
    seed = 42

    def setup(self) -> None:
        """x: (8192, K) on a GPU, (512, K) on the CPU; weight: (N, K); bias: (N,)."""
        rows = 512 if self.device == "cpu" else 8192
        self.x = uniform(rows, K, limit=1.0, device=self.device)
        self.weight = uniform(N, K, limit=0.5 / K**0.5, device=self.device)
        self.bias = uniform(N, limit=0.1, device=self.device)

    def benchmark_bias(self) -> None:
        self.out = self.kernel.linear(self.x, self.weight, self.bias)

    def verify_bias(self) -> torch.Tensor:
        return F.linear(self.x, self.weight, self.bias)

    def benchmark_tanh(self) -> None:
        self.out = self.kernel.linear(self.x, self.weight, self.bias, activation="gelu_tanh")

    def verify_tanh(self) -> torch.Tensor:
        return F.gelu(F.linear(self.x, self.weight, self.bias), approximate="tanh")

    def benchmark_exact(self) -> None:
        self.out = self.kernel.linear(self.x, self.weight, self.bias, activation="gelu")

    def verify_exact(self) -> torch.Tensor:
        return F.gelu(F.linear(self.x, self.weight, self.bias))
