"""Which cases a suite times and which bars it holds them to, as data."""

from dataclasses import dataclass, field

from .linear import memory_name
from .model import FORMS, Bar, Case
from .providers import (
    ADDMM,
    COMPILE,
    EAGER,
    GATED,
    LAYER,
    LIGER,
    LINEAR,
    MUL,
    NOARCH,
    OURS,
    PACKED,
    PRODUCTS,
    QUACK,
    UNPACKED,
)

MEGABYTE = 1e6

# A shape's first and second call do the same work; what is left between them and torch.mul's is noise up to here.
_NOISE = 1.10


@dataclass(frozen=True)
class Suite:
    """Cases, bars on them, and whether the probes (start-up, accuracy, size) run as well."""

    cases: tuple[Case, ...]
    bars: tuple[Bar, ...] = field(default=())
    probes: bool = False
    memory: tuple[Case, ...] = field(default=())  # training steps whose peak memory is measured


def quick(device: str) -> Suite:
    """A minute's look at every direction and form."""
    if device == "cpu":
        return Suite(
            (
                Case("geglu", 16, 4096, (OURS, EAGER, COMPILE), "wall"),
                Case("geglu", 256, 4096, (OURS, EAGER, COMPILE), "wall"),
                Case("geglu", 256, 4096, (OURS, EAGER, COMPILE), "wall", form="none"),
                Case("geglu_packed", 256, 4096, (OURS, UNPACKED, EAGER), "wall"),
                Case("geglu_backward", 256, 4096, (OURS, EAGER), "wall"),
            )
        )
    return Suite(
        (
            Case("geglu", 128, 14336, (OURS, EAGER, LIGER), "event"),
            Case("geglu", 8192, 3072, (OURS, EAGER, COMPILE, LIGER), "event"),
            Case("geglu", 8192, 3072, (OURS, EAGER, COMPILE), "event", form="none"),
            Case("geglu_packed", 8192, 3072, (OURS, UNPACKED, EAGER, LIGER), "event"),
            Case("geglu_backward", 8192, 3072, (OURS, EAGER, LIGER), "event"),
            Case("geglu", 1, 14336, (OURS, EAGER, LIGER, MUL), "graph"),
            Case("geglu", 1, 14336, (OURS, EAGER, LIGER, MUL), "host"),
        )
    )


def issue2(device: str) -> Suite:
    """The must-reach table of the package's first issue: the rows that this device can measure."""
    cases, bars = _issue2_cpu() if device == "cpu" else _issue2_cuda()
    return Suite(tuple(cases), tuple(bars + _startup_bars() + _accuracy_bars()), probes=True)


def issue3(device: str) -> Suite:
    """The must-reach table of the linear layer."""
    return _issue3_cpu() if device == "cpu" else _issue3_cuda()


def issue4(device: str) -> Suite:
    """The noarch variants (Triton, or torch's operations on the CPU) beside the compiled ones."""
    if device == "cpu":
        names = (OURS, NOARCH, EAGER)
        return Suite(tuple(Case(op, 256, 4096, names, "wall") for op in ("geglu", "geglu_packed", "geglu_backward")))
    sizes = ((8192, 3072), (8192, 14336))
    forward = [Case("geglu", *size, (OURS, NOARCH, EAGER, LIGER), "event") for size in sizes]
    exact = [Case("geglu", *size, (OURS, NOARCH, EAGER), "event", form="none") for size in sizes]
    packed = [Case("geglu_packed", *size, (OURS, NOARCH, EAGER), "event") for size in sizes]
    backward = [Case("geglu_backward", *size, (OURS, NOARCH, EAGER, LIGER), "event") for size in sizes]
    host = Case("geglu", 1, 14336, (OURS, NOARCH, EAGER, LIGER), "host")
    bars = [_against(case, OURS, 1.05, of=NOARCH) for case in (*forward, *exact)]
    bars += [_against(host, LIGER, 0.7, of=NOARCH)]
    return Suite((*forward, *exact, *packed, *backward, host), tuple(bars))


# inner, cols: Gemma 2B, Gemma 2 9B, Gemma 3 27B; ModernBERT-base, and the width of BERT's block
_GEMMAS = ((2048, 16384), (3584, 14336), (5376, 21504))
_SMALL = ((768, 1152), (768, 3072))


def issue5(device: str) -> Suite:
    """The whole gated block, from one row to thousands, never slower than a peer."""
    if device == "cpu":
        return Suite(tuple(Case("geglu_mlp", m, 3072, (OURS, EAGER), "wall", inner=768) for m in (1, 16, 256)))
    names = (OURS, EAGER, LIGER)
    few, many = (1, 4, 8, 16), (1024, 8192)
    more = {(m, shape): (PACKED,) for shape in _GEMMAS for m in (64, 256)}
    more |= {(1024, _GEMMAS[1]): (PACKED, COMPILE), (8192, _SMALL[1]): (PACKED, COMPILE, QUACK)}
    more[8192, _GEMMAS[1]] = (GATED, PRODUCTS, QUACK)
    cases = {
        (m, shape): Case("geglu_mlp", m, shape[1], (*names, *more.get((m, shape), ())), "graph", inner=shape[0])
        for shape in (*_GEMMAS, *_SMALL)
        for m in (2**power for power in range(15))
    }
    hosted = (OURS, LAYER, EAGER, COMPILE, LIGER, LINEAR)
    host = Case("geglu_mlp", 1, _SMALL[1][1], hosted, "host", inner=_SMALL[1][0])

    bars = []
    for shape, floors, eager in zip(_GEMMAS, (1.12, 1.08, 1.06), (None, 0.94, 0.95), strict=True):
        bars += [_against(cases[m, shape], "floor", floors) for m in few]
        bars += [_against(cases[m, shape], "floor", limit) for m, limit in ((64, 1.15), (256, 1.20))]
        bars += [_against(cases[256, shape], EAGER, 0.95)]
        bars += [_against(cases[8192, shape], EAGER, eager)] if eager else []
    for shape, limit in zip(_SMALL, (0.34, 0.42), strict=True):
        bars += [_against(cases[m, shape], EAGER, limit) for m in few if m != 4]
    bars += [_against(cases[many[0], _GEMMAS[1]], EAGER, 0.96)]
    bars += [_against(cases[many[1], _SMALL[1]], who, limit) for who, limit in ((EAGER, 0.70), (LIGER, 0.75))]
    bars += [_against(cases[many[1], _GEMMAS[1]], PRODUCTS, 0.97, GATED)]
    bars += [_against(cases[many[1], shape], QUACK, limit) for shape, limit in ((_SMALL[1], 1.00), (_GEMMAS[1], 1.01))]
    for who, limit in ((LINEAR, 1.6), (EAGER, 0.4), (LIGER, 0.25)):
        bars += [_against(host, who, limit, ours) for ours in (OURS, LAYER)]
    bars += [_against(cases[place], OURS, 1.02, PACKED) for place, extra in more.items() if PACKED in extra]
    for case in cases.values():
        bars += [_against(case, who, 1.02) for who in (EAGER, LIGER, COMPILE) if who in case.providers]
    return Suite((*cases.values(), host), tuple(bars))


SUITES = {"quick": quick, "issue2": issue2, "issue3": issue3, "issue4": issue4, "issue5": issue5}


def free(
    rows: list[int], cols: list[int], dtypes: list[str], forms: list[str], ops: list[str], modes: list[str]
) -> Suite:
    """Every combination of the options, with all providers that the op has."""
    return Suite(
        tuple(
            Case(op, m, n, _everyone(op, form, mode), mode, form, dtype)
            for op in ops
            for mode in modes
            for dtype in dtypes
            for form in forms
            for n in cols
            for m in rows
        )
    )


def _everyone(op: str, form: str, mode: str) -> tuple[str, ...]:
    names = [OURS, EAGER]
    names += [UNPACKED] if op == "geglu_packed" else []
    names += [COMPILE] if op != "geglu_backward" else []
    names += [LIGER] if form == "tanh" and mode != "wall" else []
    names += [MUL] if mode in ("graph", "host") else []
    return tuple(names)


def _against(case: Case, who: str, limit: float, of: str = OURS) -> Bar:
    """The time of `of` over that of `who` ("floor" or a provider) is at most `limit`."""
    what = f"{case.label}: {of} / {who}"
    return Bar(what, case.value_name(of), limit, bottom=case.value_name(who))


def _faster(case: Case, who: str, times: float) -> Bar:
    what = f"{case.label}: {who} / ours"
    return Bar(what, case.value_name(who), times, bottom=case.value_name(OURS), at_least=True)


def _issue2_cuda() -> tuple[list[Case], list[Bar]]:
    sizes = ((8192, 3072), (4096, 16384), (8192, 14336), (16384, 21504))
    tanh = {size: Case("geglu", *size, (OURS, EAGER, COMPILE, LIGER), "event") for size in sizes}
    exact = {size: Case("geglu", *size, (OURS, EAGER), "event", form="none") for size in sizes}
    packed = {size: Case("geglu_packed", *size, (OURS, UNPACKED, EAGER, LIGER), "event") for size in sizes}
    backward = {
        size: Case("geglu_backward", *size, (OURS, EAGER, LIGER), "event") for size in sizes if size != (4096, 16384)
    }
    small = Case("geglu", 1, 14336, (OURS, EAGER, LIGER, MUL), "graph")
    host = Case("geglu", 1, 14336, (OURS, EAGER, LIGER, MUL), "host")
    bars = []
    for forward in (tanh, exact):
        bars += [_against(forward[size], "floor", 1.03) for size in ((8192, 14336), (16384, 21504))]
        bars += [_against(forward[8192, 3072], "floor", 1.15)]
    bars += [
        _against(tanh[8192, 3072], LIGER, 0.86),
        _against(tanh[4096, 16384], LIGER, 0.70),
        _against(tanh[8192, 14336], LIGER, 0.70),
    ]
    bars += [_against(case, UNPACKED, 1.03) for case in packed.values()]
    bars += [
        _against(backward[8192, 14336], "floor", 1.05),
        _against(backward[16384, 21504], "floor", 1.05),
        _against(backward[16384, 21504], LIGER, 0.60),
        _against(small, MUL, 1.15),
        _against(host, MUL, 1.6),
        _against(host, LIGER, 0.35),
    ]
    return [*tanh.values(), *exact.values(), *packed.values(), *backward.values(), small, host], bars


def _issue2_cpu() -> tuple[list[Case], list[Bar]]:
    tanh = Case("geglu", 1024, 11008, (OURS, EAGER, COMPILE), "wall")
    exact = Case("geglu", 1024, 11008, (OURS, EAGER, COMPILE), "wall", form="none")
    return [tanh, exact], [_faster(tanh, EAGER, 3.0), _faster(tanh, COMPILE, 2.5), _faster(exact, EAGER, 1.5)]


# rows, inner, cols
_BLOG, _WIDE = (8192, 768, 3072), (8192, 4096, 16384)
_LINEAR_SHAPES = ((1024, 32, 64), _BLOG, (8192, 1024, 4096), _WIDE, (16, 4096, 16384))


def _linear(
    shape: tuple[int, int, int], form: str, mode: str = "event", *, op: str = "linear", tuned: bool = False
) -> Case:
    rows, inner, cols = shape
    names = [OURS, EAGER]
    if op == "linear":
        names = [OURS, LINEAR] if form == "bias" else [OURS, LINEAR, EAGER]
        names += [ADDMM] if form == "tanh" else []
    return Case(op, rows, cols, tuple(names), mode, form, inner=inner, tuned=tuned)


def _issue3_cuda() -> Suite:
    forms = ("bias", "tanh", "none")
    plain = {(form, shape): _linear(shape, form) for form in forms for shape in _LINEAR_SHAPES}
    tuned = {(form, shape): _linear(shape, form, tuned=True) for form in forms for shape in _LINEAR_SHAPES}
    host = {form: _linear(_LINEAR_SHAPES[0], form, "host") for form in forms}
    train = [
        _linear(_BLOG, form, op="linear_train", tuned=after) for after in (False, True) for form in ("tanh", "none")
    ]
    bars = []
    for shape in _LINEAR_SHAPES:
        bars += [_against(plain["bias", shape], LINEAR, 1.02), _against(tuned["bias", shape], LINEAR, 1.00)]
        bars += [_against(case["none", shape], EAGER, 1.00) for case in (plain, tuned)]
    bars += [
        _against(tuned["tanh", _BLOG], LINEAR, 1.05),
        _against(tuned["tanh", _BLOG], EAGER, 0.70),
        _against(tuned["tanh", _BLOG], ADDMM, 0.93),
        _against(tuned["tanh", _WIDE], LINEAR, 1.03),
        _against(tuned["none", _BLOG], EAGER, 0.85),
        *(_against(case, LINEAR, 1.1) for case in host.values()),
    ]
    for case in train:
        if case.form == "tanh":
            bars += [_against(case, EAGER, 0.85), _memory_bar(case)]
    cases = (*plain.values(), *host.values(), *train[:2], *tuned.values(), *train[2:])
    return Suite(cases, tuple(bars), memory=tuple(train))


def _issue3_cpu() -> Suite:
    shape = (256, 768, 3072)
    cases = [_linear(shape, form, "wall") for form in ("bias", "tanh", "none")]
    train = [_linear(shape, form, "wall", op="linear_train") for form in ("tanh", "none")]
    # Small, so that the cost of a call shows.
    cases += [_linear((1, 32, 64), form, "wall") for form in ("bias", "tanh")]
    return Suite((*cases, *train))


def _memory_bar(case: Case) -> Bar:
    what = f"{case.label}: peak memory, ours / eager"
    return Bar(what, memory_name(case, OURS), 0.99, bottom=memory_name(case, EAGER))


def _startup_bars() -> list[Bar]:
    return [
        Bar("import + get_kernel + first call, seconds", "startup: seconds", 1.0),
        Bar(
            "a shape's first call / its second, over the same of torch.mul",
            "startup: new / seen",
            _NOISE,
            bottom="startup: new / seen, torch.mul",
        ),
    ]


def _accuracy_bars() -> list[Bar]:
    bars = []
    for dtype, share in (("bfloat16", 0.999), ("float16", 0.99)):
        for form in FORMS:
            name = f"accuracy {dtype} {form}"
            bars += [
                Bar(f"{name}: share equal to eager, bit for bit", f"{name}: equal", share, at_least=True),
                Bar(f"{name}: ulp from eager, gate >= -3", f"{name}: ulp", 1),
                # With up = 1. A step between two gelus can become two steps between their products.
                Bar(f"{name}: ulp from eager's gelu, gate >= -3", f"{name}: gelu ulp", 1),
                Bar(f"{name}: error / eager's", f"{name}: error", 1.05, bottom=f"{name}: eager error"),
                Bar(f"{name}: error / eager's, gate < -3", f"{name}: tail", 1.05, bottom=f"{name}: eager tail"),
            ]
    return bars


def size_bar(variant: str) -> Bar:
    """At most 4 MB for one built variant."""
    return Bar(f"{variant}, MB", f"size: {variant}", 4.0)
