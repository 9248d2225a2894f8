// Elements of a 16-bit type that the launch decides, in kernels which only pass them to MMAs or convert them: one
// instance then serves both types.
#pragma once

namespace convgrad {

struct Bits16 {
  unsigned short bits;
};

}  // namespace convgrad
