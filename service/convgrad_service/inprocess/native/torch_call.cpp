#include "torch_call.hpp"

namespace convgrad {

Settings settings;

namespace {

bool add_tensor(CallKey* key, const Operator& op, Tensor tensor) {
  const Torch& torch = settings.torch;
  int64_t dim, *sizes, *strides;
  int32_t dtype, layout, device;
  if (torch.dim(tensor, &dim) || torch.layout(tensor, &layout)) return false;
  if (layout != settings.strided_layout || dim > 5) return false;
  if (torch.sizes(tensor, &sizes) || torch.strides(tensor, &strides) ||
      torch.dtype(tensor, &dtype) || torch.device_index(tensor, &device)) {
    return false;
  }
  if (op.convolves && dtype == settings.float32_dtype) return false;
  if (key->device != kNoDevice && device != key->device) return false;
  key->device = device;
  bool fits = add(key, uint64_t(dim) << 32 | uint32_t(dtype));
  for (int64_t i = 0; i < dim; ++i) fits = add(key, sizes[i]) && add(key, strides[i]) && fits;
  return fits;
}

bool add_list(Key* key, void* list) {
  size_t count;
  if (settings.torch.list_size(list, &count)) return false;
  bool fits = add(key, count);
  for (size_t i = 0; i < count && fits; ++i) {
    Value item;
    fits = settings.torch.list_item(list, i, &item) == 0 && add(key, item);
  }
  return fits;
}

}  // namespace

bool add_arguments(CallKey* key, const Operator& op, const Value* stack) {
  for (int i = 0; op.kinds[i] != 0; ++i) {
    const Value value = stack[i];
    bool fits;
    switch (op.kinds[i]) {
      case 'T': fits = add_tensor(key, op, handle<void>(value)); break;
      case 'l': fits = add_list(key, handle<void>(value)); break;
      case 'L': fits = value ? add(key, 1) && add_list(key, handle<void>(*handle<Value>(value)))
                             : add(key, 0); break;
      case 'S': fits = value ? add(key, 1) && add(key, *handle<Value>(value)) : add(key, 0); break;
      default: fits = add(key, value);
    }
    if (!fits) return false;
  }
  return true;
}

void drop_arguments(const Operator& op, const Value* stack) {
  const Torch& torch = settings.torch;
  for (int i = 0; op.kinds[i] != 0; ++i) {
    const Value value = stack[i];
    if (op.kinds[i] == 'T') torch.drop(handle<void>(value));
    if (op.kinds[i] == 'l') torch.list_drop(handle<void>(value));
    if (op.kinds[i] == 'L' && value) torch.list_drop(handle<void>(*handle<Value>(value)));
    if ((op.kinds[i] == 'L' || op.kinds[i] == 'S') && value) torch.cell_drop(handle<void>(value));
  }
}

namespace {

struct Numbers {
  int64_t value[8];
  int64_t count = 0;
  bool read(void* list) {
    size_t size;
    if (settings.torch.list_size(list, &size) || size > 8) return false;
    for (size_t i = 0; i < size; ++i) {
      Value item;
      if (settings.torch.list_item(list, i, &item)) return false;
      value[count++] = static_cast<int64_t>(item);
    }
    return true;
  }
};

}  // namespace

bool own_convolution(const Value* stack, Tensor* results) {
  Numbers bias, stride, padding, dilation, output_padding, mask;
  if (stack[3] && !bias.read(handle<void>(*handle<Value>(stack[3])))) return false;
  if (!stride.read(handle<void>(stack[4])) || !padding.read(handle<void>(stack[5])) ||
      !dilation.read(handle<void>(stack[6])) || !output_padding.read(handle<void>(stack[8])) ||
      !mask.read(handle<void>(stack[10]))) {
    return false;
  }
  const int64_t* bias_sizes = bias.value;
  const int32_t masks[3] = {mask.value[0] != 0, mask.value[1] != 0, mask.value[2] != 0};
  return settings.torch.convolution_backward(
             handle<void>(stack[0]), handle<void>(stack[1]), handle<void>(stack[2]),
             stack[3] ? &bias_sizes : nullptr, bias.count, stride.value, stride.count,
             padding.value, padding.count, dilation.value, dilation.count, stack[7] != 0,
             output_padding.value, output_padding.count, static_cast<int64_t>(stack[9]), masks,
             mask.count, &results[0], &results[1], &results[2]) == 0;
}

}  // namespace convgrad
