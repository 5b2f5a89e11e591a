// Which instruction sets were compiled, and which of them this processor has.
#pragma once

#include "step.h"

namespace tidegate {

struct Choice {
    const char* name;
    const Tier* tier;
};

// The fastest that this processor has, or if `wanted` is not empty that one. Its tier is null if there is none.
Choice choose(const char* wanted);

}  // namespace tidegate
