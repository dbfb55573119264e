"""Smoke benchmark of `geglu_mlp` for `kernels benchmark ./`: the whole gated block against eager torch.

The runner compares with an absolute tolerance of 1e-2, so the weights are small enough that results stay far below 1,
where a few bf16 rounding steps are less than that.
"""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark

D, H = 768, 3072


def uniform(*shape: int, limit: float, device: str) -> torch.Tensor:
    """bf16 values in [-limit, limit]."""
    return torch.empty(*shape, device=device).uniform_(-limit, limit).to(torch.bfloat16)


class GeGLUMLP(Benchmark):
    seed = 42

    def setup(self) -> None:
        """few: (1, D), many: (8192, D) on a GPU, (512, D) on the CPU; gate and up: (H, D); down: (D, H)."""
        self.few = uniform(1, D, limit=1.0, device=self.device)
        self.many = uniform(512 if self.device == "cpu" else 8192, D, limit=1.0, device=self.device)
        self.gate, self.up = (uniform(H, D, limit=1 / D**0.5, device=self.device) for _ in range(2))
        self.down = uniform(D, H, limit=0.5 / H**0.5, device=self.device)

    def ours(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernel.geglu_mlp(x, self.gate, self.up, self.down)

    def eager(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(F.linear(x, self.gate), approximate="tanh") * F.linear(x, self.up)
        return F.linear(hidden, self.down)

    def benchmark_few(self) -> None:
        self.out = self.ours(self.few)

    def verify_few(self) -> torch.Tensor:
        return self.eager(self.few)

    def benchmark_many(self) -> None:
        self.out = self.ours(self.many)

    def verify_many(self) -> torch.Tensor:
        return self.eager(self.many)
