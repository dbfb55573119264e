#include "scale.h"

namespace {
__global__ void scale(float* values) { values[threadIdx.x] *= kScale; }
}  // namespace

void launch_scale(float* values) { scale<<<1, 32>>>(values); }
