"""Checkpointing, autocast, inference mode, forward-mode and functorch transforms: as eager, or one clear error."""

import functools
import itertools

import pytest
import reference
import torch
from reference import FORMS, HALVES
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

FORM_CASES = pytest.mark.parametrize("approximate", FORMS)


class MLP(nn.Module):
    """(64, 128) -> 256 -> 128 with a replaceable gated activation; `packed` keeps gate and up in one weight."""

    def __init__(self, activation, packed):
        super().__init__()
        self.activation, self.packed = activation, packed
        self.project = nn.Linear(128, 512, bias=False)
        self.down = nn.Linear(256, 128, bias=False)

    def forward(self, x):
        hidden = self.project(x)
        return self.down(self.activation(hidden) if self.packed else self.activation(*hidden.chunk(2, -1)))


def run(activation, packed, device, amp, weights, checkpointing):
    """(output, parameter gradients, input gradient) of one training step."""
    torch.manual_seed(7)
    model = MLP(activation, packed).to(device, weights)
    x = torch.randn(64, 128, device=device, dtype=weights, requires_grad=True)
    with torch.autocast(device.type, dtype=amp, enabled=amp is not None):
        out = checkpointing(model, x)
    out.float().square().mean().backward()
    return out.detach(), *(p.grad for p in model.parameters()), x.grad


def plain(model, x):
    return model(x)


CHECKPOINTING = {
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "not_reentrant": functools.partial(checkpoint, use_reentrant=False),
    "save_matmuls": functools.partial(
        checkpoint,
        use_reentrant=False,
        context_fn=functools.partial(
            create_selective_checkpoint_contexts,
            lambda ctx, op, *args, **kwargs: (
                CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE
            ),
        ),
    ),
    "save_everything": functools.partial(
        checkpoint,
        use_reentrant=False,
        context_fn=functools.partial(
            create_selective_checkpoint_contexts, lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_SAVE
        ),
    ),
}


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("packed", (False, True), ids=("split", "packed"))
@pytest.mark.parametrize(
    ("amp", "weights"),
    # The last is the case that stayed broken after others' first fix: fp32 weights under fp16 autocast.
    [(None, torch.float32), (None, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16, torch.float32)],
    ids=("fp32", "bf16", "amp_bf16", "amp_fp16"),
)
def test_checkpointing_changes_nothing(kernel, device, checkpointing, packed, amp, weights):
    activation = kernel.geglu_packed if packed else kernel.geglu
    with_it = run(activation, packed, device, amp, weights, CHECKPOINTING[checkpointing])
    without = run(activation, packed, device, amp, weights, plain)
    for mine, theirs in zip(with_it, without, strict=True):
        reference.assert_same_bits(mine, theirs)


@pytest.mark.parametrize("packed", (False, True), ids=("split", "packed"))
@pytest.mark.parametrize("amp", (None, torch.bfloat16, torch.float16), ids=("fp32", "amp_bf16", "amp_fp16"))
def test_training_step_equals_eager(kernel, device, packed, amp):
    eager = functools.partial(reference.eager, approximate="tanh")
    ours = run(kernel.geglu_packed if packed else kernel.geglu, packed, device, amp, torch.float32, plain)
    theirs = run((lambda h: eager(*h.chunk(2, -1))) if packed else eager, packed, device, amp, torch.float32, plain)
    # Every stage is a sum over up to 256 products of rounded values: one eps of the computing type each, at the
    # largest magnitude of the result.
    eps = torch.finfo(amp or torch.float32).eps
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        assert (mine.double() - other.double()).abs().max() <= 4 * eps * other.double().abs().max()


MIXED = [(a, b) for a, b in itertools.permutations((torch.float32, torch.float16, torch.bfloat16), 2)]


@pytest.mark.parametrize(("gate_dtype", "up_dtype"), MIXED, ids=str)
@FORM_CASES
def test_mixed_dtypes_under_autocast_are_eagers(kernel, device, gate_dtype, up_dtype, approximate):
    gate, up = torch.randn(3, 37, device=device).to(gate_dtype), torch.randn(3, 37, device=device).to(up_dtype)
    results = []
    for function in (kernel.geglu, reference.eager):
        leaves = [t.clone().requires_grad_() for t in (gate, up)]
        with torch.autocast(device.type, dtype=torch.bfloat16):
            out = function(*leaves, approximate=approximate)
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
        assert [g.dtype for g in grads] == [gate_dtype, up_dtype]
        results.append((out, *grads))
    for mine, theirs in zip(*results, strict=True):
        reference.assert_same_bits(mine, theirs)


@pytest.mark.parametrize("dtype", (torch.float32, *HALVES), ids=str)
@pytest.mark.parametrize("amp", HALVES, ids=str)
def test_equal_dtypes_under_autocast_keep_theirs(kernel, device, dtype, amp):
    """Eager's gelu and mul are not on autocast's lists: they run in the type of their inputs."""
    gate, up = (torch.randn(3, 37, device=device).to(dtype) for _ in "gu")
    # Packed out here: torch.cat is on a list, and refuses float16 under bfloat16.
    x = torch.cat((gate, up), -1)
    with torch.autocast(device.type, dtype=amp):
        out, packed = kernel.geglu(gate, up), kernel.geglu_packed(x)
        assert out.dtype == reference.eager(gate, up, "tanh").dtype == packed.dtype == dtype
    reference.assert_accurate(out, gate, up, "tanh")
    reference.assert_same_bits(packed, out)


def test_inference_mode(kernel, device):
    with torch.inference_mode():
        gate, up = (torch.randn(3, 37, device=device) for _ in "gu")
        out = kernel.geglu(gate, up)
        assert out.is_inference() and not out.requires_grad
        reference.assert_accurate(out, gate, up, "tanh")
        buffer = torch.empty_like(out)
        kernel.gelu_tanh_and_mul(buffer, torch.cat((gate, up), -1))
        reference.assert_same_bits(buffer, out)


def test_out_variant_tells_autograd_that_it_wrote(kernel, device):
    """A tensor saved for backward and then overwritten must be noticed, not used."""
    saved = torch.randn(3, 8, device=device)
    leaf = torch.randn(3, 8, device=device, requires_grad=True)
    product = leaf * saved
    kernel.gelu_and_mul(saved, torch.randn(3, 16, device=device))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@FORM_CASES
def test_functional_grad(kernel, device, approximate):
    gate, up = (torch.randn(3, 5, dtype=torch.float64, device=device) for _ in "gu")
    grads = torch.func.grad(lambda g, u: kernel.geglu(g, u, approximate=approximate).sum(), argnums=(0, 1))(gate, up)
    reference.assert_accurate_grads(grads, torch.ones_like(gate), gate, up, approximate)
    packed = torch.cat((gate, up), -1)
    packed_grad = torch.func.grad(lambda x: kernel.geglu_packed(x, approximate=approximate).sum())(packed)
    reference.assert_accurate_grads(reference.split(packed_grad), torch.ones_like(gate), gate, up, approximate)


def works_or_says_so(call, expected, words):
    """Right, or refused by an error that says what is not supported; never a wrong number."""
    try:
        result = call()
    except (RuntimeError, NotImplementedError) as error:
        if not any(word in str(error) for word in words):
            raise
    else:
        torch.testing.assert_close(result, expected)


@FORM_CASES
def test_vmap(kernel, device, approximate):
    gate, up = (torch.randn(4, 3, 5, dtype=torch.float64, device=device) for _ in "gu")
    words = ("vmap", "batching rule")
    for in_dims in ((0, 0), (1, 1), (2, 2)):
        call = torch.vmap(lambda g, u: kernel.geglu(g, u, approximate=approximate), in_dims=in_dims)
        moved = [t.movedim(dim, 0) for t, dim in zip((gate, up), in_dims, strict=True)]
        works_or_says_so(functools.partial(call, gate, up), reference.geglu(*moved, approximate), words)
    one = up[0]
    call = torch.vmap(lambda g, u: kernel.geglu(g, u, approximate=approximate), in_dims=(0, None))
    works_or_says_so(lambda: call(gate, one), reference.geglu(gate, one.expand_as(gate), approximate), words)
    packed = torch.cat((gate, up), -1)
    call = torch.vmap(lambda x: kernel.geglu_packed(x, approximate=approximate), in_dims=1, out_dims=1)
    works_or_says_so(lambda: call(packed), reference.geglu(gate, up, approximate), words)


@FORM_CASES
def test_per_sample_gradients(kernel, device, approximate):
    gate, up = (torch.randn(4, 5, dtype=torch.float64, device=device) for _ in "gu")
    per_sample = torch.vmap(torch.func.grad(lambda g, u: kernel.geglu(g, u, approximate=approximate).sum()))
    expected, _ = reference.geglu_grads(torch.ones_like(gate), gate, up, approximate)
    works_or_says_so(lambda: per_sample(gate, up), expected, ("vmap", "batching rule", "functorch"))


@FORM_CASES
def test_forward_mode(kernel, device, approximate):
    """torch.func.jvp and dual tensors; a lost tangent would be a silent zero, so a missing one fails here."""
    gate, up, gate_t, up_t = (torch.randn(3, 5, dtype=torch.float64, device=device) for _ in range(4))
    words = ("forward", "jvp", "Forward AD", "forward-mode")

    def expected(g_t, u_t):
        grad_gate, grad_up = reference.geglu_grads(torch.ones_like(gate), gate, up, approximate)
        return grad_gate * g_t + grad_up * u_t

    split = functools.partial(kernel.geglu, approximate=approximate)
    packed = functools.partial(kernel.geglu_packed, approximate=approximate)
    both = expected(gate_t, up_t)
    works_or_says_so(lambda: torch.func.jvp(split, (gate, up), (gate_t, up_t))[1], both, words)
    cat = [torch.cat(pair, -1) for pair in ((gate, up), (gate_t, up_t))]
    works_or_says_so(lambda: torch.func.jvp(packed, (cat[0],), (cat[1],))[1], both, words)

    def dual(function, primals, tangents):
        with torch.autograd.forward_ad.dual_level():
            duals = [
                primal if tangent is None else torch.autograd.forward_ad.make_dual(primal, tangent)
                for primal, tangent in zip(primals, tangents, strict=True)
            ]
            tangent = torch.autograd.forward_ad.unpack_dual(function(*duals)).tangent
        assert tangent is not None, "the tangent was dropped without a word"
        return tangent

    zero = torch.zeros_like(gate)
    works_or_says_so(lambda: dual(split, (gate, up), (gate_t, up_t)), both, words)
    works_or_says_so(lambda: dual(split, (gate, up), (gate_t, None)), expected(gate_t, zero), words)
    works_or_says_so(lambda: dual(split, (gate, up), (None, up_t)), expected(zero, up_t), words)
    works_or_says_so(lambda: dual(packed, (cat[0],), (cat[1],)), both, words)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode_and_hooks(kernel, device):
    gate, up = (torch.randn(3, 5, device=device, requires_grad=True) for _ in "gu")
    seen = []
    with torch.autograd.detect_anomaly(check_nan=True):
        out = kernel.geglu(gate, up)
        out.register_hook(seen.append)
        gate.register_hook(lambda grad: grad * 2)
        out.sum().backward()
    assert len(seen) == 1
    expected, _ = reference.geglu_grads(torch.ones_like(gate), gate.detach(), up.detach(), "tanh")
    torch.testing.assert_close(gate.grad.double(), 2 * expected, rtol=1e-5, atol=1e-6)
