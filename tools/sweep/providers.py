"""Who takes part: for each provider, how one call of a case is made ready and run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from . import linear, mlp
from .linear import ADDMM, EAGER, LINEAR, OURS, LinearInputs
from .mlp import MlpInputs
from .model import LINEAR_OPS, MLP_OPS, Case

COMPILE, LIGER, QUACK = "compile", "liger", "quack"
NOARCH = "ours, noarch"  # the variant without a compiled library
MUL = "torch.mul"  # the cheapest op with the same inputs and output
PACKED = "ours, packed weight"  # gate and up as the halves of one weight
GATED = "ours, linear_geglu"  # the block's first half alone
PRODUCTS = "two products"  # of that half, by torch, without GeGLU
LAYER = "ours, layer"  # as kernelize leaves a module
UNPACKED = "ours, two tensors"  # geglu on contiguous copies of the packed halves


class Unavailable(Exception):
    """This provider cannot run this case; the message says why."""


@dataclass(frozen=True)
class Inputs:
    """One input set. gate, up: (rows, cols); grad like gate or None; packed: (rows, 2 * cols) or None."""

    gate: torch.Tensor
    up: torch.Tensor
    grad: torch.Tensor | None = None
    packed: torch.Tensor | None = None


def nothing() -> None:
    pass


@dataclass(frozen=True)
class Call:
    """`run` is timed and returns its result(s); `prepare` comes before each run, outside the timed region."""

    run: Callable[[], Any]
    prepare: Callable[[], None] = nothing


@dataclass(frozen=True)
class Provider:
    """`bind` turns an input set into a Call. `checked`: computes the op, so its numbers must be right."""

    bind: Callable[[Inputs | LinearInputs | MlpInputs], Call]
    checked: bool = True


@dataclass(frozen=True)
class Peers:
    """What can be run: the kernel, its noarch variant, liger's geglu and quack's mlp module, torch.compile or not.

    A module that is None is not there; for the two peers `absent` says why, by provider.
    """

    kernel: ModuleType | SimpleNamespace
    noarch: ModuleType | None = None
    liger: ModuleType | None = None
    quack: ModuleType | None = None
    absent: Mapping[str, str] = field(default_factory=dict)
    compile: bool = True


def make_inputs(case: Case, device: torch.device, seed: int) -> Inputs | LinearInputs | MlpInputs:
    """A fresh set of N(0, 1) inputs. Every tensor is an allocation of its own, aligned as a user's would be."""
    if case.op in MLP_OPS:
        return mlp.make_inputs(case, device, seed)
    if case.op in LINEAR_OPS:
        return linear.make_inputs(case, device, seed)
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def normal(cols: int) -> torch.Tensor:
        return torch.randn(case.rows, cols, generator=generator, device=device, dtype=dtype)

    if case.op == "geglu_packed":
        packed = normal(2 * case.cols)
        gate, up = packed.chunk(2, dim=-1)
        return Inputs(gate, up, packed=packed)
    grad = normal(case.cols) if case.direction == "backward" else None
    return Inputs(normal(case.cols), normal(case.cols), grad=grad)


def make_provider(name: str, case: Case, peers: Peers) -> Provider:
    """The provider `name` for `case`; raises Unavailable where it has no such op, form or device."""
    return _MAKERS[name](case, peers)


def _eager_geglu(gate: torch.Tensor, up: torch.Tensor, form: str) -> torch.Tensor:
    return F.gelu(gate, approximate=form) * up


def _ours(case: Case, peers: Peers) -> Provider:
    kernel = peers.kernel
    if case.op in MLP_OPS:
        return Provider(lambda i: Call(mlp.ours(case, kernel, i)))
    if case.op in LINEAR_OPS:
        return Provider(lambda i: Call(linear.ours(case, kernel, i)))
    if case.op == "geglu":
        return Provider(lambda i: Call(partial(kernel.geglu, i.gate, i.up, approximate=case.form)))
    if case.op == "geglu_packed":
        return Provider(lambda i: Call(partial(kernel.geglu_packed, i.packed, approximate=case.form)))
    backward = kernel._ops.ops.geglu_backward
    return Provider(lambda i: Call(partial(backward, i.grad, i.gate, i.up, case.form == "tanh")))


def _noarch(case: Case, peers: Peers) -> Provider:
    if peers.noarch is None:
        raise Unavailable("its build/torch-* was not built")
    return _ours(case, replace(peers, kernel=peers.noarch))


def _packed(case: Case, peers: Peers) -> Provider:
    return Provider(lambda i: Call(mlp.packed(case, peers.kernel, i)))


def _gated(case: Case, peers: Peers) -> Provider:
    return Provider(lambda i: Call(mlp.gated(case, peers.kernel, i)), checked=False)


def _products(case: Case, peers: Peers) -> Provider:
    return Provider(lambda i: Call(partial(mlp.two_products, i)), checked=False)


def _layer(case: Case, peers: Peers) -> Provider:
    return Provider(lambda i: Call(mlp.layer(case, peers.kernel, i)))


def _unpacked(case: Case, peers: Peers) -> Provider:
    def bind(inputs: Inputs) -> Call:
        return Call(
            partial(peers.kernel.geglu, inputs.gate.contiguous(), inputs.up.contiguous(), approximate=case.form)
        )

    return Provider(bind)


def _eager(case: Case, peers: Peers) -> Provider:
    if case.op in MLP_OPS:
        return Provider(lambda i: Call(mlp.composed(case, i)))
    if case.op in LINEAR_OPS:
        return Provider(lambda i: Call(linear.composed(case, i)))
    if case.direction == "forward":
        return Provider(lambda i: Call(partial(_eager_geglu, i.gate, i.up, case.form)))
    if case.mode == "graph":
        raise Unavailable("autograd runs on the stream of its forward, which is not the captured one")

    def bind(inputs: Inputs) -> Call:
        gate, up = inputs.gate.detach().requires_grad_(), inputs.up.detach().requires_grad_()
        with torch.enable_grad():
            out = _eager_geglu(gate, up, case.form)
        return Call(partial(torch.autograd.grad, out, (gate, up), inputs.grad, retain_graph=True))

    return Provider(bind)


def _compiled(case: Case, peers: Peers) -> Provider:
    if not peers.compile:
        raise Unavailable("switched off by --no-compile")
    if case.direction == "backward":
        raise Unavailable("a compiled backward cannot be called without its forward")
    # Each case starts with an empty cache: past its recompile limit dynamo would refuse further static shapes.
    torch.compiler.reset()
    if case.op in MLP_OPS:
        return Provider(lambda i: Call(mlp.compiled(case, i)))
    compiled = torch.compile(_eager_geglu, fullgraph=True, dynamic=False)
    return Provider(lambda i: Call(partial(compiled, i.gate, i.up, case.form)))


def _liger(case: Case, peers: Peers) -> Provider:
    if peers.liger is None:
        raise Unavailable(peers.absent[LIGER])
    if case.form != "tanh":
        raise Unavailable("liger-kernel has the tanh form only")
    if case.op in MLP_OPS:
        return Provider(lambda i: Call(mlp.liger(peers.liger.LigerGELUMulFunction.apply, i)))
    if case.direction == "forward":
        # Packed halves are copied by its own contiguity wrapper, inside the timed call: that is what a user pays.
        return Provider(lambda i: Call(partial(peers.liger.LigerGELUMulFunction.apply, i.gate, i.up)))
    if case.mode == "graph":
        raise Unavailable("writes over its inputs, so a replay would not see the same numbers")

    def bind(inputs: Inputs) -> Call:
        gate, up = inputs.gate.clone(), inputs.up.clone()

        def refill() -> None:
            gate.copy_(inputs.gate)
            up.copy_(inputs.up)

        return Call(partial(peers.liger.geglu_backward, gate, up, inputs.grad), prepare=refill)

    return Provider(bind)


def _quack(case: Case, peers: Peers) -> Provider:
    if peers.quack is None:
        raise Unavailable(peers.absent[QUACK])
    if case.form != "tanh":
        raise Unavailable("quack has the tanh form only")
    return Provider(lambda i: Call(mlp.quack(peers.quack.mlp_func, i)))


def _linear(case: Case, peers: Peers) -> Provider:
    if case.op in MLP_OPS:
        return Provider(lambda i: Call(mlp.one_projection(i)), checked=False)
    return Provider(lambda i: Call(partial(F.linear, *i.forward)), checked=case.form == "bias")


def _addmm(case: Case, peers: Peers) -> Provider:
    if case.form != "tanh":
        raise Unavailable("has the tanh form only")
    # On the CPU the same function computes the exact form.
    return Provider(lambda i: Call(linear.addmm_activation(i)), checked=False)


def _mul(case: Case, peers: Peers) -> Provider:
    return Provider(lambda i: Call(partial(torch.mul, i.gate, i.up)), checked=False)


_MAKERS = {
    OURS: _ours,
    NOARCH: _noarch,
    PACKED: _packed,
    GATED: _gated,
    PRODUCTS: _products,
    LAYER: _layer,
    UNPACKED: _unpacked,
    EAGER: _eager,
    COMPILE: _compiled,
    LIGER: _liger,
    QUACK: _quack,
    MUL: _mul,
    LINEAR: _linear,
    ADDMM: _addmm,
}

NAMES = tuple(_MAKERS)
