"""The pointwise kernels in Triton, forward and backward: for elements that are neighbours, and for rows.

Arithmetic, roundings and special values are those of docs/semantics.md, written as in kernel_src/common/gelu.h, which
has the derivations. Only operations of the language itself are used: functions that Triton imports from a device
library have moved between its releases.
"""

import triton
import triton.language as tl


@triton.jit
def _exp2(t):
    """2^t within 1.5 ulp, for t in [-200, 200]; 0 below the smallest normal number.

    2^t = 2^n * 2^f with n = round(t), |f| <= 1/2, and 2^f by its Taylor series, whose remainder is below 2^-27. The
    hardware's exponential is worth 22 bits only. 2^n is made in two factors, each within the range of its exponent.
    """
    shifted = t + 12582912.0  # 1.5 * 2^23: adding it rounds to an integer
    n = shifted - 12582912.0
    f = t - n
    p = 1.5252733804059840e-5 * f + 1.5403530393381609e-4
    p = p * f + 1.3333558146428443e-3
    p = p * f + 9.618129107628477e-3
    p = p * f + 5.550410866482158e-2
    p = p * f + 2.4022650695910072e-1
    p = p * f + 6.931471805599453e-1
    p = p * f + 1.0
    exponent = n.to(tl.int32)
    low = exponent >> 1
    scaled = p * ((low + 127) << 23).to(tl.float32, bitcast=True)
    result = scaled * ((exponent - low + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(t < -126.0, 0.0, result)


@triton.jit
def _reciprocal(d):
    """1 / d for d >= 1, within 2^-21; 0 for infinity. A division takes several times the instructions."""
    root = tl.rsqrt(d)
    return root * root


@triton.jit
def _tail_tanh(a, PRECISE: tl.constexpr):
    """1 + exp(t(a)), whose reciprocal is q = F(-a) = sigmoid(-t(a)); t(a) times log2(e) in the constants."""
    t = a * (2.30220819814432488913 + 0.10294323958002348742 * (a * a))
    if PRECISE:
        return 1.0 + _exp2(t)
    return 1.0 + tl.exp2(t)


@triton.jit
def _gaussian(a, PRECISE: tl.constexpr):
    """exp(-a^2 / 2). Precisely: a^2 in two parts, because an error in the exponent becomes a relative error."""
    if PRECISE:
        high = (a.to(tl.int32, bitcast=True) & -4096).to(tl.float32, bitcast=True)  # 12 bits: its square is exact
        square = high * high
        t = -0.721347520444481703680 * square
        rest = _product_error(square, t) - 0.721347520444481703680 * ((a - high) * (a + high))
        return tl.where(t + rest < -126.0, 0.0, _exp2(t) * _exp2(rest))
    t = -0.721347520444481703680 * (a * a)
    return tl.where(t < -126.0, 0.0, tl.exp2(t))


@triton.jit
def _product_error(s, t):
    """c * s - t for t = round(c * s), c = -log2(e) / 2 in three parts of which the first two have 12 bits."""
    s_high = (s.to(tl.int32, bitcast=True) & -4096).to(tl.float32, bitcast=True)
    s_low = s - s_high
    error = -0.72119140625 * s_high - t
    error = error + -0.72119140625 * s_low
    return error + -0.000156114194481703680 * s


@triton.jit
def _tail_exact(a, PRECISE: tl.constexpr):
    """(e * N, D, e): q = F(-a) = e * N / D with e = exp(-a^2 / 2) and R(a) = N / D."""
    e = _gaussian(a, PRECISE)
    if PRECISE:
        n = 0.0404413939 + a * 0.00408559712
        n = 0.5 + a * (0.437593937 + a * (0.182689205 + a * n))
        d = 0.468022615 + a * (0.10137812 + a * 0.0102409506)
        d = 1.0 + a * (1.6730727 + a * (1.20029318 + a * d))
    else:
        n = 0.5 + a * (0.348143667 + a * (0.111597568 + a * 0.0151724881))
        d = 1.0 + a * (1.49416649 + a * (0.915425539 + a * (0.279410392 + a * 0.0380408429)))
    return e * n, d, e


@triton.jit
def _near_slope(x):
    """(Phi(x) - 1/2) / x for |x| < 1."""
    s = x * x
    p = 0.000127863066 + s * -1.33814328e-05
    p = -0.0664909333 + s * (0.00997786876 + s * (-0.00119897362 + s * p))
    return 0.398942292 + s * p


@triton.jit
def _gelu(x, TANH: tl.constexpr, PRECISE: tl.constexpr, DERIVATIVE: tl.constexpr):
    """gelu(x) and, if DERIVATIVE, gelu'(-|x|), else x. PRECISE: to float32's accuracy, else to that of half types.

    x is float32. gelu(NaN) is NaN. gelu'(x) is gelu'(-|x|) for negative x, else 1 minus that.
    """
    FAR: tl.constexpr = 10.085 if TANH else 13.28
    a = tl.minimum(tl.abs(x), FAR)
    if TANH:
        denominator = _tail_tanh(a, PRECISE)
        numerator = tl.full(a.shape, 1.0, tl.float32)
        e = numerator
    else:
        numerator, denominator, e = _tail_exact(a, PRECISE)
    if PRECISE:
        q = tl.div_rn(numerator, denominator)
        x_q = tl.div_rn(tl.minimum(x, FAR) * numerator, denominator)
        value = tl.where(x <= 0.0, x_q, x - x_q)
        # Near 0, 1/2 + (Phi(x) - 1/2) has the smaller rounding error.
        if not TANH:
            near = _near_slope(a)
            value = tl.where(a < 1.0, x * (0.5 + x * near), value)
            q = tl.where(a < 1.0, 0.5 - a * near, q)
    else:
        q = numerator * _reciprocal(denominator)
        value = x * tl.where(x < 0.0, q, 1.0 - q)
    h = x
    if DERIVATIVE:
        if TANH:
            slope = a * (1.59576912160573071176 + 0.21406444881780074633 * (a * a))
            h = q - q * (1.0 - q) * slope
        else:
            h = q - a * (e * 0.398942280401432677940)
    return value, h


@triton.jit
def _times_derivative(d, x, h, PRECISE: tl.constexpr):
    """d * gelu'(x) for h = gelu'(-|x|)."""
    product = d * tl.where(x < 0.0, h, 1.0 - h)
    if PRECISE:
        # d - d * h is rounded once where 1 - h would be, too. Not for infinite d, which may meet h = 0.
        product = tl.where((x >= 0.0) & (tl.abs(d) < float("inf")), d - d * h, product)
    return tl.where(x == x, product, x)


@triton.jit
def _forward(g, u, GATED: tl.constexpr, TANH: tl.constexpr):
    """round(gelu(g)) * u, or gelu(g) unless GATED, in g's type."""
    value, _ = _gelu(g.to(tl.float32), TANH, g.dtype == tl.float32, False)
    h = value.to(g.dtype)
    if GATED:
        h = (h.to(tl.float32) * u.to(tl.float32)).to(g.dtype)
    return h


@triton.jit
def _backward(d, g, u, GATED: tl.constexpr, TANH: tl.constexpr):
    """round(d * u) * gelu'(g) and d * round(gelu(g)) in g's type; d * gelu'(g) twice unless GATED."""
    wide = d.to(tl.float32)
    x = g.to(tl.float32)
    value, h = _gelu(x, TANH, g.dtype == tl.float32, True)
    if GATED:
        for_up = (wide * value.to(g.dtype).to(tl.float32)).to(g.dtype)
        wide = (wide * u.to(tl.float32)).to(g.dtype).to(tl.float32)
    for_gate = _times_derivative(wide, x, h, g.dtype == tl.float32).to(g.dtype)
    if not GATED:
        for_up = for_gate
    return for_gate, for_up


@triton.jit
def _span(count, SIZE: tl.constexpr):
    """Offsets and mask of this program's elements. 64-bit numbers: tensors pass 2^31 elements."""
    offset = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    return offset, offset < count


@triton.jit
def forward_flat(gate, up, out, count, GATED: tl.constexpr, TANH: tl.constexpr, SIZE: tl.constexpr):
    """out = round(gelu(gate)) * up over `count` neighbouring elements, or gelu(gate) unless GATED; out may be gate.

    Few arguments: every one costs the host at each launch.
    """
    offset, mask = _span(count, SIZE)
    g = tl.load(gate + offset, mask)
    u = g
    if GATED:
        u = tl.load(up + offset, mask)
    tl.store(out + offset, _forward(g, u, GATED, TANH), mask)


@triton.jit
def backward_flat(
    grad_out, gate, up, grad_gate, grad_up, count, GATED: tl.constexpr, TANH: tl.constexpr, SIZE: tl.constexpr
):
    """The gradients of gate and up over `count` neighbouring elements; of gate alone unless GATED."""
    offset, mask = _span(count, SIZE)
    d = tl.load(grad_out + offset, mask)
    g = tl.load(gate + offset, mask)
    u = g
    if GATED:
        u = tl.load(up + offset, mask)
    for_gate, for_up = _backward(d, g, u, GATED, TANH)
    tl.store(grad_gate + offset, for_gate, mask)
    if GATED:
        tl.store(grad_up + offset, for_up, mask)


@triton.jit
def _tile(rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Rows, columns and mask of this program's tile, in 64 bits like the offsets that they are multiplied to."""
    across = (cols + COLS - 1) // COLS
    place = tl.program_id(0).to(tl.int64)
    row = (place // across) * ROWS + tl.arange(0, ROWS)[:, None]
    col = (place % across) * COLS + tl.arange(0, COLS)[None, :]
    return row, col, (row < rows) & (col < cols)


@triton.jit
def forward_rows(
    gate,  # (rows, cols), neighbouring rows gate_row elements apart
    up,  # the same with up_row
    out,
    gate_row,
    up_row,
    out_row,
    rows,
    cols,
    TANH: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """out = round(gelu(gate)) * up."""
    row, col, mask = _tile(rows, cols, ROWS, COLS)
    g = tl.load(gate + row * gate_row + col, mask)
    u = tl.load(up + row * up_row + col, mask)
    tl.store(out + row * out_row + col, _forward(g, u, True, TANH), mask)


@triton.jit
def backward_rows(
    grad_out,  # (rows, cols), neighbouring rows grad_out_row elements apart; the others alike
    gate,
    up,
    grad_gate,
    grad_up,
    grad_out_row,
    gate_row,
    up_row,
    grad_gate_row,
    grad_up_row,
    rows,
    cols,
    TANH: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """grad_gate = round(grad_out * up) * gelu'(gate) and grad_up = grad_out * round(gelu(gate))."""
    row, col, mask = _tile(rows, cols, ROWS, COLS)
    d = tl.load(grad_out + row * grad_out_row + col, mask)
    g = tl.load(gate + row * gate_row + col, mask)
    u = tl.load(up + row * up_row + col, mask)
    for_gate, for_up = _backward(d, g, u, True, TANH)
    tl.store(grad_gate + row * grad_gate_row + col, for_gate, mask)
    tl.store(grad_up + row * grad_up_row + col, for_up, mask)
