"""A Gemma 3 of realistic width with random weights, eager and kernelized, and what the two compute."""

import copy
import logging
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from kernels import (
    KernelizeFallback,
    LocalLayerRepository,
    Mode,
    kernelize,
    replace_kernel_forward_from_hub,
    use_kernel_mapping,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP

LAYER = "GeGLUMLP"


def build(num_layers: int, device: str, dtype: torch.dtype) -> Gemma3ForCausalLM:
    """A Gemma 3 text model with the width and heads of Gemma 3 1B, `num_layers` layers and a small vocabulary."""
    config = Gemma3TextConfig(
        vocab_size=2048,
        hidden_size=1152,
        intermediate_size=6912,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
        max_position_embeddings=8192,
        # Tied random embeddings make the model repeat its last token whatever the layers compute.
        tie_word_embeddings=False,
        # Greedy decoding has to run its full length.
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return Gemma3ForCausalLM(config).eval().to(dtype)


def kernelized_copy(model: Gemma3ForCausalLM, root: Path, device: str) -> Gemma3ForCausalLM:
    """A copy of `model` whose GeGLU blocks run the kernel built under `root`; `model` itself stays as it is."""
    # transformers gives Gemma's block no kernel layer name, so the user does; the condition keeps out a config with
    # another activation.
    replace_kernel_forward_from_hub(
        Gemma3MLP, LAYER, condition=lambda mlp: mlp.config.hidden_activation == "gelu_pytorch_tanh"
    )
    # The model's other layer names (rotary embeddings, activations) have no kernel here: not worth a warning each.
    logging.getLogger("kernels").setLevel(logging.ERROR)
    mapping = {LAYER: {device: LocalLayerRepository(root, layer_name=LAYER)}}
    with use_kernel_mapping(mapping, inherit_mapping=False):
        return kernelize(
            copy.deepcopy(model),
            mode=Mode.INFERENCE,
            device=device,
            use_fallback=KernelizeFallback.NO_LAYER | KernelizeFallback.NO_DEVICE,
        )


class _CalledLibraries(TorchDispatchMode):
    """Collects the namespaces of all operators that are called: a kernel's is its package's name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.namespace)
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def replaced(model: Gemma3ForCausalLM, kernel: ModuleType) -> tuple[int, int, str]:
    """(blocks that call the kernel, blocks in all, the module that their forward is in).

    Each is run once: a layer that was not replaced, or keeps its host's arithmetic, computes the same numbers.
    """
    blocks = [module for module in model.modules() if isinstance(module, Gemma3MLP)]
    homes = []
    for block in blocks:
        with _CalledLibraries() as called:
            block(torch.zeros(1, 1, block.hidden_size, dtype=model.dtype, device=model.device))
        if kernel.__name__ in called.names:
            homes.append(block.forward.__func__.__module__)
    return len(homes), len(blocks), homes[0] if homes else ""


@dataclass(frozen=True)
class Differences:
    """Largest absolute differences between logits of the same prompt."""

    ours_eager: float
    eager_exact: float
    ours_exact: float
    largest_logit: float


@torch.no_grad()
def compare_logits(eager: Gemma3ForCausalLM, ours: Gemma3ForCausalLM, ids: torch.Tensor) -> Differences:
    """Compares the logits of `ids` (batch, length) with each other and with those of a float64 copy of `eager`.

    transformers computes norms and rotary embeddings in float32 whatever the weights' type, so does the float64 copy.
    """
    of_eager, of_ours = eager(ids).logits.double(), ours(ids).logits.double()
    exact = copy.deepcopy(eager).double()(ids).logits
    return Differences(
        ours_eager=(of_ours - of_eager).abs().max().item(),
        eager_exact=(of_eager - exact).abs().max().item(),
        ours_exact=(of_ours - exact).abs().max().item(),
        largest_logit=exact.abs().max().item(),
    )


@torch.no_grad()
def generate(model: Gemma3ForCausalLM, ids: torch.Tensor, num_tokens: int) -> list[int]:
    """`num_tokens` greedy tokens after the prompt `ids` (1, length)."""
    sequence = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False)
    return sequence[0, ids.shape[1] :].tolist()


@torch.no_grad()
def lead(model: Gemma3ForCausalLM, ids: torch.Tensor, tokens: list[int]) -> float:
    """How far the best logit leads the second after the prompt `ids` and `tokens`: what a difference has to bridge."""
    so_far = torch.cat([ids[0], torch.tensor(tokens, dtype=ids.dtype, device=ids.device)])
    best, second = model(so_far[None]).logits[0, -1].float().topk(2).values.tolist()
    return best - second
