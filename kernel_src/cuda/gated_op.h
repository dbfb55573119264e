// The kernels of our own that take a product of the gated block whole: both projections and GeGLU, or the way back.
#pragma once

#include <string>

#include "linear_ops.h"

namespace geglu::cuda {

// The kernel for x @ gate.weight.T + gate.bias, or with `up` for gelu(that) * (x @ up.weight.T + up.bias): its name and
// configuration, as in "tall_gemm:96x2". Empty if there is none, or if cuBLASLt is faster.
std::string own_kernel(const LinearCall& gate, const LinearCall* up);

// Runs it into out (rows, cols), contiguous. False if there is none, and then nothing was done. after_own: the kernel
// before it in the stream is another of these, which wrote nothing but the x of this one.
bool run_own_kernel(const LinearCall& gate, const LinearCall* up, bool tanh, bool after_own,
                    const torch::stable::Tensor& out);

}  // namespace geglu::cuda
