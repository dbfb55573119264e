"""What is measured, and the arithmetic on it: a case, a measured row, a bar. No torch here."""

from dataclasses import astuple, dataclass

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}

# Tensors of rows x cols elements that must cross the memory bus once, whatever the implementation.
TENSORS_MOVED = {
    "geglu": 3,  # gate, up -> out
    "geglu_packed": 3,  # the two halves -> out
    "geglu_backward": 5,  # grad, gate, up -> grad_gate, grad_up
}

LINEAR_OPS = ("linear", "linear_train")
MLP_OPS = ("geglu_mlp",)
OPS = (*TENSORS_MOVED, *LINEAR_OPS, *MLP_OPS)
FORMS = ("tanh", "none")
LINEAR_FORMS = (*FORMS, "bias")  # "bias": no activation
MODES = ("event", "graph", "host", "wall")

OK, FAILED, NOT_AVAILABLE = "ok", "FAILED", "n/a"
MET, MISSED, NOT_MEASURED = "MET", "MISSED", "not measured"


@dataclass(frozen=True)
class Ceilings:
    """What the device was measured to do at most; None where that was not measured."""

    copy: float  # bytes per second of a copy, read plus written
    read: float | None = None  # bytes per second of a reduction, which writes nothing to speak of
    gemm: float | None = None  # FLOP per second of a bf16 product of 8192 x 8192 x 8192

    def __post_init__(self):
        for name in ("copy", "read", "gemm"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}: expected a positive rate, got {value}")

    def best(self, other: "Ceilings") -> "Ceilings":
        """The larger of each rate in two measurements of the same device: a ceiling is not what is exceeded."""
        rates = zip(astuple(self), astuple(other), strict=True)
        return Ceilings(*(None if one is None or two is None else max(one, two) for one, two in rates))


@dataclass(frozen=True)
class Case:
    """One thing to time: an op on (rows, cols) halves of `dtype`, with the providers that take turns.

    The linear ops multiply (rows, inner) by (inner, cols); a gated block takes (rows, inner) to itself by way of two
    projections of `cols` columns. With `tuned`, our algorithms are measured before the clock
    starts; untuned cases of the same shape must come earlier in a run.
    """

    op: str
    rows: int
    cols: int
    providers: tuple[str, ...]
    mode: str
    form: str = "tanh"
    dtype: str = "bfloat16"
    inner: int = 0
    tuned: bool = False

    def __post_init__(self):
        for name, value, allowed in (
            ("op", self.op, OPS),
            ("form", self.form, LINEAR_FORMS if self.op in LINEAR_OPS else FORMS),
            ("mode", self.mode, MODES),
            ("dtype", self.dtype, tuple(ITEM_BYTES)),
        ):
            if value not in allowed:
                raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}")
        if self.rows < 1 or self.cols < 1:
            raise ValueError(f"rows and cols must be positive, got {self.rows} x {self.cols}")
        if (self.inner > 0) != (self.op in (*LINEAR_OPS, *MLP_OPS)):
            raise ValueError(f"inner must be positive for an op with products and 0 for any other, got {self.inner}")

    @property
    def direction(self) -> str:
        return {"geglu_backward": "backward", "linear_train": "both"}.get(self.op, "forward")

    @property
    def shape(self) -> str:
        return f"{self.rows}x{self.inner}x{self.cols}" if self.inner else f"{self.rows}x{self.cols}"

    @property
    def minimal_bytes(self) -> int:
        """Bytes that must move: every input read once, every output written once."""
        if self.op in MLP_OPS:  # x and out, and three weights
            return (2 * self.rows + 3 * self.cols) * self.inner * ITEM_BYTES[self.dtype]
        if self.inner:
            # x, weight, bias and out; in training also grad_out, and a gradient for each of the first three.
            inputs = self.rows * self.inner + self.cols * self.inner + self.cols
            steps = 2 if self.op == "linear_train" else 1
            return steps * (inputs + self.rows * self.cols) * ITEM_BYTES[self.dtype]
        return TENSORS_MOVED[self.op] * self.rows * self.cols * ITEM_BYTES[self.dtype]

    def floor_micros(self, ceilings: Ceilings) -> float | None:
        """Microseconds that the device needs at least; None where a ceiling that this rests on was not measured.

        A gated block reads three weights and multiplies each with every row: the longer of the two. The others move
        their bytes at the speed of a copy, whatever arithmetic they need.
        """
        if self.op not in MLP_OPS:
            return self.minimal_bytes / ceilings.copy * 1e6
        if ceilings.read is None or ceilings.gemm is None:
            return None
        weights = 3 * self.inner * self.cols
        return max(weights * ITEM_BYTES[self.dtype] / ceilings.read, 2 * self.rows * weights / ceilings.gemm) * 1e6

    @property
    def label(self) -> str:
        return f"{self.op} {self.shape} {self.dtype} {self.form} {self.mode}" + (" tuned" if self.tuned else "")

    def value_name(self, who: str) -> str:
        """The name under which the time of provider `who` (or "floor") goes into the measured values."""
        return f"{self.label}: {who}"


@dataclass
class Row:
    """The outcome for one provider of one case. `micros` is the median time of one call, None unless status is ok."""

    case: Case
    provider: str
    status: str = OK
    micros: float | None = None
    fastest: float | None = None  # the least of the samples: on a busy machine it says more than the median
    spread: float | None = None  # interquartile range over the median
    error: float | None = None  # relative L2 error against fp64, of the worst result
    error_bound: float | None = None
    note: str = ""


def row_values(rows: list[Row], ceilings: Ceilings) -> dict[str, float]:
    """The flat `value name -> microseconds` of all timed rows, with one "floor" for each case that has one."""
    values = {}
    for row in rows:
        floor = row.case.floor_micros(ceilings)
        if floor is not None:
            values[row.case.value_name("floor")] = floor
        if row.micros is not None:
            values[row.case.value_name(row.provider)] = row.micros
    return values


@dataclass(frozen=True)
class Bar:
    """A limit on values[top] / values[bottom], or on values[top] alone when `bottom` is empty."""

    what: str
    top: str
    limit: float
    bottom: str = ""
    at_least: bool = False

    @property
    def limit_text(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.limit:g}"

    def measured(self, values: dict[str, float]) -> float | None:
        """The value that the limit applies to; None when a part of it was not measured."""
        if self.top not in values or (self.bottom and self.bottom not in values):
            return None
        return values[self.top] / values[self.bottom] if self.bottom else values[self.top]

    def verdict(self, values: dict[str, float]) -> str:
        """MET, MISSED or not measured. A value that is not a number misses its bar."""
        measured = self.measured(values)
        if measured is None:
            return NOT_MEASURED
        met = measured >= self.limit if self.at_least else measured <= self.limit
        return MET if met else MISSED
