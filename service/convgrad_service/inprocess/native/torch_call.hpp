// How PyTorch's stable C ABI passes the arguments of operators, and keys made of them.
//
// The structures are those of convgrad/torch/_front.py. Functions of PyTorch return 0 unless they
// fail; they never throw, except `check`.
#pragma once

#include "call_table.hpp"
#include "launch_plan.hpp"

namespace convgrad {

using Value = uint64_t;  // StableIValue: a number, or a handle that its receiver owns
using Tensor = void*;    // AtenTensorHandle

// PyTorch's C functions, in the order of _front.py.
struct Torch {
  int (*dim)(Tensor, int64_t*);
  int (*sizes)(Tensor, int64_t**);
  int (*strides)(Tensor, int64_t**);
  int (*dtype)(Tensor, int32_t*);
  int (*layout)(Tensor, int32_t*);
  int (*device_index)(Tensor, int32_t*);
  int (*data)(Tensor, void**);
  int (*empty)(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Tensor*);
  int (*undefined)(Tensor*);
  int (*drop)(Tensor);
  int (*copy)(Tensor into, Tensor from, int32_t non_blocking);
  int (*list_size)(void*, size_t*);
  int (*list_item)(void*, size_t, Value*);
  int (*list_drop)(void*);
  int (*cell_drop)(void*);
  int (*dispatch)(const char*, const char*, Value*);
  int (*stream)(int32_t, void**);
  void (*check)(bool, const char*, const char*, uint32_t, const char*);
  int (*convolution_backward)(Tensor, Tensor, Tensor, const int64_t**, int64_t, const int64_t*,
                              int64_t, const int64_t*, int64_t, const int64_t*, int64_t, int32_t,
                              const int64_t*, int64_t, int64_t, const int32_t*, int64_t, Tensor*,
                              Tensor*, Tensor*);
};

struct Settings {
  Driver driver;
  Torch torch;
  int32_t device_type, uint8_dtype, float32_dtype, strided_layout;
  uint64_t alignment;  // of tensors' addresses, in bytes
};

extern Settings settings;

constexpr int kResults = 3;
constexpr int kArguments = 16;

// Kinds of arguments: T tensor, s scalar (int or bool), l list of them; S and L if optional.
struct Operator {
  char kinds[kArguments + 1];
  char behind[64];    // the operator in Python
  uint32_t results;
  uint32_t convolves;  // convolution_backward, whose float32 precision is a setting of PyTorch's
};

constexpr int32_t kNoDevice = -128;

struct CallKey : Key {
  int32_t device = kNoDevice;
  void* stream;
};

template <class T>
T* handle(Value value) {
  return reinterpret_cast<T*>(value);
}

// Appends the arguments on an operator's stack; false if they do not fit.
bool add_arguments(CallKey* key, const Operator& op, const Value* stack);

// Frees the arguments, which a kernel owns.
void drop_arguments(const Operator& op, const Value* stack);

// Runs PyTorch's own kernel of convolution_backward on its stack; false if it fails.
bool own_convolution(const Value* stack, Tensor* results);

}  // namespace convgrad
