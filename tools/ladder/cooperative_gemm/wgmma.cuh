// The product with 256 columns, beside those that the package has.
#pragma once

#include "cuda/sm90/wgmma.cuh"

namespace geglu::cuda::sm90 {

GEGLU_DEFINE_WGMMA(256, 128, GEGLU_TO_109 GEGLU_MORE(11) ", %120, %121, %122, %123, %124, %125, %126, %127", "%128",
                   "%129", "%130", GEGLU_SUMS_32(0), GEGLU_SUMS_32(32), GEGLU_SUMS_32(64), GEGLU_SUMS_32(96))

}  // namespace geglu::cuda::sm90
