"""torch.library.opcheck for every operator, and fakes whose layout is the real result's for every layout of inputs."""

import layouts
import pytest
import torch
from layouts import LAYOUTS
from reference import DTYPES
from torch._subclasses.fake_tensor import FakeTensorMode

# One layout of each kind: dense, regular rows, swapped batch, column-major, stride 0, irregular, empty.
CHECKED = ("dense", "packed_halves", "padded_rows", "swapped_batch", "column_major", "expanded_rows", "five_dims")
FEW = [layout for layout in LAYOUTS if layout.name in CHECKED]
LAYOUT_CASES = pytest.mark.parametrize("layout", FEW, ids=layouts.ids(FEW))


def schema_names(ops):
    prefix = f"{ops.name}::"
    schemas = torch._C._jit_get_all_schemas()
    return {schema.name.removeprefix(prefix) for schema in schemas if schema.name.startswith(prefix)}


# The operators that opcheck sees.
TESTED = {
    "geglu",
    "geglu_packed",
    "geglu_backward",
    "geglu_packed_backward",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    # In test_linear_backward.py.
    "linear",
    "linear_with_preactivation",
    "linear_backward",
    # In test_mlp.py.
    "linear_geglu",
    "geglu_mlp",
}
# No results that a compiler or autograd would have to know about.
PRIVATE = {
    "cpu_capability",
    "linear_route",
    "linear_tune",
    "linear_export_tuning",
    "linear_import_tuning",
    "geglu_mlp_route",
}


def test_no_operator_is_left_out(ops):
    assert schema_names(ops) == TESTED | PRIVATE


def check(operator, arguments):
    torch.library.opcheck(operator.default, arguments)


@LAYOUT_CASES
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_split(ops, device, layout, dtype):
    gate, up = layout.tensors(dtype, device)
    grad = torch.randn(gate.shape, device=device).to(dtype)
    check(ops.geglu, (gate, up, True))
    check(ops.geglu_backward, (grad, gate, up, False))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(ops, device, dtype):
    x = torch.randn(3, 14, device=device).to(dtype)
    for tanh in (True, False):
        check(ops.geglu, (x, x.flip(0), tanh))
        check(ops.geglu_packed, (x, tanh, True))


@pytest.mark.parametrize("shape", [(3, 14), (2, 5, 6), (16,), (0, 8), (2, 3, 4, 2)], ids=str)
@pytest.mark.parametrize("gate_first", (True, False))
def test_packed(ops, device, shape, gate_first):
    # A swap of the outer dimensions: more than two dimensions than one fake knows would fail here.
    x = torch.randn(shape, device=device).transpose(0, -2 if len(shape) > 1 else 0)
    grad = torch.randn(*x.shape[:-1], x.shape[-1] // 2, device=device)
    check(ops.geglu_packed, (x, True, gate_first))
    check(ops.geglu_packed_backward, (grad, x, True, gate_first))


@pytest.mark.parametrize("name", ("gelu_and_mul", "gelu_tanh_and_mul"))
@pytest.mark.parametrize("shape", [(3, 14), (2, 5, 6), (0, 8)], ids=str)
def test_out_variants(ops, device, name, shape):
    x = torch.randn(shape, device=device)
    out = torch.empty(*shape[:-1], shape[-1] // 2, device=device)
    check(getattr(ops, name), (out, x))
    padded = torch.empty(*shape[:-1], shape[-1] // 2 + 3, device=device)[..., : shape[-1] // 2]
    check(getattr(ops, name), (padded, x))


def described(result):
    """What a compiler relies on. The stride of a dimension of one element says nothing; torch's own fakes differ."""
    tensors = (result,) if isinstance(result, torch.Tensor) else result
    return [(t.shape, [t.stride(i) for i in range(t.dim()) if t.shape[i] != 1], t.dtype, t.device) for t in tensors]


@pytest.mark.parametrize("layout", LAYOUTS, ids=layouts.ids(LAYOUTS))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_fakes_have_the_real_layout(ops, device, layout, dtype):
    gate, up = layout.tensors(dtype, device)
    grads = torch.randn(gate.shape, device=device).to(dtype), gate.detach()
    packed = torch.stack((gate, up), dim=-2).flatten(-2) if gate.dim() > 1 else torch.cat((gate, up))
    cases = [(ops.geglu, (gate, up, True)), (ops.geglu_packed, (packed, True, True))]
    cases += [(ops.geglu_packed, (gate[..., : gate.shape[-1] // 2 * 2], False, False))]
    cases += [(ops.geglu_backward, (grad, gate, up, True)) for grad in grads]
    packed_grad = torch.randn(*packed.shape[:-1], packed.shape[-1] // 2, device=device).to(dtype)
    for x in (packed, packed.clone(memory_format=torch.contiguous_format)):
        cases.append((ops.geglu_packed_backward, (packed_grad, x, True, True)))
    for operator, arguments in cases:
        real = described(operator(*arguments))
        with FakeTensorMode(allow_non_fake_inputs=False) as mode:
            fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
            assert described(operator(*fakes)) == real, operator
