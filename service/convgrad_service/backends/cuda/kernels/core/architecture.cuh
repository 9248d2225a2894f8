// Architectures for which registers are allocated otherwise than for Hopper.
#pragma once

namespace convgrad {

// kAda: 8.9, and 8.6, for which the same code is made.
#if defined(__CUDA_ARCH__)
constexpr bool kBlackwell = __CUDA_ARCH__ >= 1000, kAda = __CUDA_ARCH__ > 800 && __CUDA_ARCH__ < 900;
#else
constexpr bool kBlackwell = false, kAda = false;
#endif

}  // namespace convgrad
