// Kernels of the operators of ATen that `convgrad.torch.use` overrides, registered by PyTorch's stable
// C ABI: a call that was prepared before is launched from here, in a microsecond and without Python;
// any other goes to the operator in Python that it stands in front of, which may have it remembered.
//
// A call's key holds everything that the prepared pass depends on: the operator, the choice of
// `convgrad.torch.use`, the stream, and all arguments, of tensors their sizes, strides and dtypes.
#include "torch_call.hpp"

extern "C" int clock_gettime(int, int64_t*);  // of seconds and nanoseconds

namespace convgrad {
namespace {

constexpr int kOperators = 24;

constexpr uint32_t kInputs = 8;

// A dense tensor: a result, or what the kernels read of an argument.
struct Dense {
  int64_t dim, sizes[5], strides[5];
  int32_t dtype, slot;  // which result or argument it is
};

// A prepared call. Without a plan it is left to PyTorch's own kernel.
struct Entry {
  Kept kept;
  LaunchPlan* plan;
  void* context;  // CUcontext
  uint64_t calls, nanoseconds;  // how often it was answered here, and the host's time for that
  uint64_t workspace_bytes;
  uint32_t input_count, output_count;
  uint64_t scattered;  // a bit for each input whose argument is not dense
  Dense inputs[kInputs], outputs[kResults];
};

Operator operators[kOperators];
CallTable table;
uint64_t choice = 0;                            // of `use`; 0 if PyTorch computes
thread_local const CallKey* pending = nullptr;  // of the call that Python is answering
thread_local char failure[4096];                // the message of the exception that it raised

bool make_key(CallKey* key, int index, const Value* stack) {
  add(key, __atomic_load_n(&choice, __ATOMIC_ACQUIRE));
  add(key, index);
  if (!add_arguments(key, operators[index], stack)) return false;
  if (settings.torch.stream(key->device, &key->stream)) return false;
  return add(key, key->device) && add(key, reinterpret_cast<uint64_t>(key->stream));
}

void drop_all(Tensor* tensors, int count) {
  for (int i = 0; i < count; ++i) {
    if (tensors[i] != nullptr) settings.torch.drop(tensors[i]);
  }
}

// Returns whether it could make a tensor, and where that is.
bool make(const Dense& like, int32_t device, Tensor* made, void** address) {
  const Torch& torch = settings.torch;
  return torch.empty(like.dim, like.sizes, like.strides, like.dtype, settings.device_type, device,
                     made) == 0 &&
         torch.data(*made, address) == 0;
}

enum class Outcome { kDone, kNotHere, kFailed };

// Launches a prepared call, whose arguments it leaves alone. kNotHere: the general way must do.
Outcome run(Entry& entry, const CallKey& key, const Operator& op, const Value* stack, Tensor* results,
            int* status) {
  const Torch& torch = settings.torch;
  void* context;
  int capturing;
  if (settings.driver.context(&context) || context != entry.context) return Outcome::kNotHere;
  if (settings.driver.is_capturing(key.stream, &capturing) || capturing) return Outcome::kNotHere;
  uint64_t buffers[kMaxBuffers];
  int tensors = 0;
  Tensor made[kResults] = {};
  Tensor passing[kInputs + 1] = {};  // copies of inputs, and the workspace: dropped when enqueued
  void* workspace = nullptr;
  bool there = true;
  for (uint32_t i = 0; i < entry.input_count && there; ++i) {
    const Dense& input = entry.inputs[i];
    const Tensor argument = handle<void>(stack[input.slot]);
    void* address;
    there = torch.data(argument, &address) == 0;
    if (entry.scattered >> i & 1 || reinterpret_cast<uint64_t>(address) % settings.alignment) {
      there = there && make(input, key.device, &passing[i], &address) &&
              torch.copy(passing[i], argument, 1) == 0;
    }
    buffers[tensors++] = reinterpret_cast<uint64_t>(address);
  }
  for (uint32_t i = 0; i < entry.output_count && there; ++i) {
    void* address;
    there = make(entry.outputs[i], key.device, &made[i], &address);
    buffers[tensors++] = reinterpret_cast<uint64_t>(address);
  }
  if (there && entry.workspace_bytes) {
    const Dense bytes = {1, {int64_t(entry.workspace_bytes)}, {1}, settings.uint8_dtype, 0};
    there = make(bytes, key.device, &passing[kInputs], &workspace);
  }
  for (uint32_t i = 0; i < op.results && there; ++i) results[i] = nullptr;
  for (uint32_t i = 0; i < entry.output_count && there; ++i) {
    results[entry.outputs[i].slot] = made[i];
  }
  for (uint32_t i = 0; i < op.results && there; ++i) {
    if (results[i] == nullptr) there = torch.undefined(&results[i]) == 0;
  }
  if (!there) {
    drop_all(made, kResults);
    drop_all(passing, kInputs + 1);
    return Outcome::kNotHere;
  }
  *status = launch(settings.driver, *entry.plan, buffers, tensors,
                   reinterpret_cast<uint64_t>(workspace), key.stream);
  drop_all(passing, kInputs + 1);
  if (*status == 0) return Outcome::kDone;
  drop_all(results, op.results);
  return Outcome::kFailed;
}

// Appends a number to a text; there is no C library to format it.
void append(char* text, uint64_t value) {
  while (*text) ++text;
  char digits[20];
  int count = 0;
  do {
    digits[count++] = static_cast<char>('0' + value % 10);
  } while (value /= 10);
  while (count) *text++ = digits[--count];
  *text = 0;
}

uint64_t now_ns() {
  int64_t time[2];
  clock_gettime(1, time);  // CLOCK_MONOTONIC
  return static_cast<uint64_t>(time[0]) * 1000000000u + static_cast<uint64_t>(time[1]);
}

void ask_python(const Operator& op, const CallKey* key, Value* stack) {
  const CallKey* before = pending;
  pending = key;
  failure[0] = 0;
  const int status = settings.torch.dispatch(op.behind, "", stack);
  pending = before;
  if (status != 0) {
    settings.torch.check(false, op.behind, "", 0, failure[0] ? failure : "an operator failed");
  }
}

void answer(int index, Value* stack) {
  const Operator& op = operators[index];
  const uint64_t started = now_ns();
  Tensor results[kResults];
  CallKey key;
  bool keyed = false, done = false;
  Entry* entry = nullptr;
  if (__atomic_load_n(&choice, __ATOMIC_ACQUIRE) != 0) {
    keyed = make_key(&key, index, stack);
    entry = keyed ? reinterpret_cast<Entry*>(table.find(key)) : nullptr;
    if (entry != nullptr && entry->plan != nullptr) {
      int status = 0;
      const Outcome outcome = run(*entry, key, op, stack, results, &status);
      if (outcome == Outcome::kFailed) {
        char text[64] = "launching failed: CUDA error ";
        append(text, static_cast<uint64_t>(status));
        drop_arguments(op, stack);
        settings.torch.check(false, op.behind, "", 0, text);
      }
      done = outcome == Outcome::kDone;
    } else if (entry != nullptr) {
      done = own_convolution(stack, results);
    }
  } else if (op.convolves && settings.torch.convolution_backward != nullptr) {
    done = own_convolution(stack, results);
  }
  if (!done) return ask_python(op, keyed && entry == nullptr ? &key : nullptr, stack);
  drop_arguments(op, stack);
  for (uint32_t i = 0; i < op.results; ++i) stack[i] = reinterpret_cast<Value>(results[i]);
  if (entry == nullptr) return;
  __atomic_fetch_add(&entry->calls, 1, __ATOMIC_RELAXED);
  __atomic_fetch_add(&entry->nanoseconds, now_ns() - started, __ATOMIC_RELAXED);
}

using Kernel = void (*)(Value*, uint64_t, uint64_t);

template <int I>
void kernel(Value* stack, uint64_t, uint64_t) {
  answer(I, stack);
}

constexpr Kernel kernels[kOperators] = {
    kernel<0>,  kernel<1>,  kernel<2>,  kernel<3>,  kernel<4>,  kernel<5>,  kernel<6>,  kernel<7>,
    kernel<8>,  kernel<9>,  kernel<10>, kernel<11>, kernel<12>, kernel<13>, kernel<14>, kernel<15>,
    kernel<16>, kernel<17>, kernel<18>, kernel<19>, kernel<20>, kernel<21>, kernel<22>, kernel<23>};

CallKey probed;

// The kernel of an operator that only shows how PyTorch passes arguments.
void probe(Value* stack, uint64_t, uint64_t) {
  const Operator& op = operators[kOperators - 1];
  probed = CallKey();
  if (!add_arguments(&probed, op, stack)) probed.words = 0;
  drop_arguments(op, stack);
  Tensor result = nullptr;
  settings.torch.undefined(&result);
  stack[0] = reinterpret_cast<Value>(result);
}

}  // namespace
}  // namespace convgrad

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void convgrad_front_settings(const convgrad::Settings* given) {
  convgrad::settings = *given;
}

// Returns a kernel to register for the last operator, and in `words` where it notes arguments.
EXPORT void* convgrad_front_probe(const uint64_t** words) {
  *words = convgrad::probed.word;
  return reinterpret_cast<void*>(&convgrad::probe);
}

// Returns the kernel to register for an operator.
EXPORT void* convgrad_front_operator(int index, const convgrad::Operator* given) {
  convgrad::operators[index] = *given;
  return reinterpret_cast<void*>(convgrad::kernels[index]);
}

EXPORT void convgrad_front_choose(uint64_t choice) {
  __atomic_store_n(&convgrad::choice, choice, __ATOMIC_RELEASE);
}

// Remembers the call that Python is answering in this thread. Returns whether it could; then the
// entry must stay alive for good.
EXPORT int convgrad_front_remember(convgrad::Entry* entry) {
  using namespace convgrad;
  const CallKey* key = pending;
  if (key == nullptr || key->word[0] != __atomic_load_n(&choice, __ATOMIC_ACQUIRE)) return 0;
  return table.keep(*key, &entry->kept);
}

// Whether the call that Python is answering in this thread can be remembered, and its stream.
EXPORT int convgrad_front_pending(void** stream) {
  if (convgrad::pending == nullptr) return 0;
  *stream = convgrad::pending->stream;
  return 1;
}

// Keeps the message of an exception, which PyTorch's C ABI does not pass on.
EXPORT void convgrad_front_failed(const char* message) {
  size_t i = 0;
  for (; message[i] != 0 && i + 1 < sizeof(convgrad::failure); ++i) {
    convgrad::failure[i] = message[i];
  }
  convgrad::failure[i] = 0;
}
