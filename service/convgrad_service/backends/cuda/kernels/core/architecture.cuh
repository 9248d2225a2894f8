// Architectures for which registers are allocated otherwise than for Hopper.
#pragma once

namespace convgrad {

// kAmpere: 8.0 to 8.9.
#if defined(__CUDA_ARCH__)
constexpr bool kBlackwell = __CUDA_ARCH__ >= 1000, kAmpere = __CUDA_ARCH__ < 900;
#else
constexpr bool kBlackwell = false, kAmpere = false;
#endif

}  // namespace convgrad
