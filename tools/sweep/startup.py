"""Run as a fresh process: what a user waits for after `import torch`. Prints one JSON object.

`LOCAL_KERNELS` in the environment points `get_kernel` at the build.
"""

import json
import sys
import time
from statistics import median

import torch

from .environment import REPO_ID

_SHAPES = 41


def main(device: str) -> None:
    def synchronize() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def pair(rows: int, cols: int) -> list[torch.Tensor]:
        return [torch.randn(rows, cols, device=device).to(torch.bfloat16) for _ in range(2)]

    gate, up = pair(16, 4096)
    synchronize()  # the device's context is torch's cost, not the kernel's
    begin = time.perf_counter()
    from kernels import get_kernel

    kernel = get_kernel(REPO_ID, version=1)
    kernel.geglu(gate, up)
    synchronize()
    seconds = time.perf_counter() - begin

    def call_micros(function, gate: torch.Tensor, up: torch.Tensor) -> float:
        synchronize()
        begin = time.perf_counter()
        function(gate, up)
        synchronize()
        return (time.perf_counter() - begin) * 1e6

    # torch.mul specialises on nothing: what its first call pays (cold memory) is no cost of a new shape.
    ratios = {kernel.geglu: [], torch.mul: []}
    for function in ratios:
        for _ in range(50):
            call_micros(function, gate, up)
    for index in range(_SHAPES):
        for function, found in ratios.items():
            # Widths of every alignment, so that each kernel path meets a shape for the first time.
            gate, up = pair(5 + index, 1000 + 37 * index)
            new = call_micros(function, gate, up)
            found.append(new / call_micros(function, gate, up))
    ours, control = map(median, ratios.values())
    print(json.dumps({"seconds": seconds, "new / seen": ours, "new / seen, torch.mul": control}))


if __name__ == "__main__":
    main(sys.argv[1])
