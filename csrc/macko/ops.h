// What other layouts' ops take of the canonical format.
#pragma once

#include "../torch/packed.h"
#include "macko.h"

namespace macko {

// The widths that deltas can have, or an error.
void check_delta_bits(const char *op, int64_t delta_bits);

// The struct over the three tensors, once they have passed every check that needs no look at their content.
macko_matrix checked_matrix(const char *op, const Packed &p);

// An error for content that cannot be read; waits for the device.
void check_content(const char *op, const macko_matrix &m, const Tensor &values);

} // namespace macko
