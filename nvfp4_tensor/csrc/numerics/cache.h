// The layout of a key-value cache in NVFP4 (numerics contract, section 11).
#pragma once

#include <cstdint>

namespace nvfp4 {

constexpr int64_t kTokenStep = 16;  // the capacity of codes is a multiple of so many tokens
constexpr int64_t kMostHeadSize = 512;

}  // namespace nvfp4
