// Handlers of XLA's typed FFI for `convgrad.jax.Local`, which compute on XLA's memory and stream. Their one
// attribute is a text that names the operation, its shapes and parameters. A call that was prepared
// before is launched from here, without Python; for any other, a function of Python's is asked to have it
// remembered, or to compute it.
//
// XLA may not capture the calls in its command buffers: kernels count arrivals in memory that launches
// on one stream share, and captured calls may run side by side.
#include "call_table.hpp"
#include "launch_plan.hpp"
#include "xla_call.hpp"

extern "C" void* memcpy(void*, const void*, size_t);

namespace convgrad {
namespace {

constexpr int kMostTensors = 16;

// A prepared call, for one device and stream.
struct XlaEntry {
  Kept kept;
  LaunchPlan* plan;
  uint64_t tensors;  // the buffer after them is the workspace
};

enum Answer { kComputed, kFailed, kRemembered };

// Of a call: the operation, the device, or -1 for the CPU, the stream, where its arguments and results
// are. Writes a message if it fails.
using Ask = int (*)(const char* text, uint64_t size, int32_t device, void* stream,
                    const uint64_t* addresses, uint64_t count, char* message);

struct XlaSettings {
  Driver driver;
  Ask ask;
};

constexpr int kMessageBytes = 4096;

XlaSettings xla_settings;
CallTable xla_table;
thread_local const Key* asked = nullptr;  // of the call that Python is answering

bool make_key(Key* key, const xla::Text& text, int32_t device, void* stream) {
  add(key, static_cast<uint64_t>(device));
  add(key, reinterpret_cast<uint64_t>(stream));
  bool fits = add(key, text.size);
  for (size_t i = 0; i < text.size && fits; i += sizeof(uint64_t)) {
    uint64_t word = 0;
    const size_t rest = text.size - i;
    memcpy(&word, text.data + i, rest < sizeof(word) ? rest : sizeof(word));
    fits = add(key, word);
  }
  return fits;
}

xla::Error* failed(const xla::CallFrame& frame, const char* message) {
  xla::ErrorCreate create = {sizeof(create), nullptr, message, xla::kInternal};
  return frame.api->error_create(&create);
}

bool append(const xla::Buffers& from, uint64_t* buffers, uint64_t* count) {
  if (*count + static_cast<uint64_t>(from.size) > kMostTensors) return false;
  for (int64_t i = 0; i < from.size; ++i) {
    buffers[(*count)++] = reinterpret_cast<uint64_t>(from.items[i]->data);
  }
  return true;
}

xla::Error* answer(const xla::CallFrame& frame, int32_t device, void* stream) {
  uint64_t buffers[kMaxBuffers];
  uint64_t count = 0;
  if (!append(frame.arguments, buffers, &count) || !append(frame.results, buffers, &count)) {
    return failed(frame, "convgrad: too many tensors");
  }
  const auto& text = *static_cast<const xla::Text*>(frame.attributes.values[0]);
  Key key;
  const bool keyed = device >= 0 && make_key(&key, text, device, stream);
  XlaEntry* entry = keyed ? reinterpret_cast<XlaEntry*>(xla_table.find(key)) : nullptr;
  if (entry == nullptr) {
    char message[kMessageBytes];
    asked = keyed ? &key : nullptr;
    const int answer =
        xla_settings.ask(text.data, text.size, device, stream, buffers, count, message);
    asked = nullptr;
    if (answer == kComputed) return nullptr;
    if (answer == kFailed) return failed(frame, message);
    entry = reinterpret_cast<XlaEntry*>(xla_table.find(key));
  }
  const uint64_t workspace = count > entry->tensors ? buffers[entry->tensors] : 0;
  const int status = launch(xla_settings.driver, *entry->plan, buffers,
                            static_cast<int>(entry->tensors), workspace, stream);
  return status == 0 ? nullptr : failed(frame, "convgrad: launching kernels failed");
}

// Whether XLA wants to do more than execute: to know of the handler, or to prepare.
bool asks_only(xla::CallFrame* frame) {
  if (frame->extensions != nullptr && frame->extensions->type == xla::kMetadata) {
    xla::Metadata* metadata = reinterpret_cast<xla::MetadataExtension*>(frame->extensions)->metadata;
    metadata->version.major = 0;
    metadata->version.minor = frame->api ? frame->api->version.minor : 1;
    metadata->traits = 0;
    return true;
  }
  return frame->stage != xla::kExecute;
}

}  // namespace
}  // namespace convgrad

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void convgrad_xla_settings(const convgrad::XlaSettings* given) {
  convgrad::xla_settings = *given;
}

EXPORT convgrad::xla::Error* convgrad_xla_cpu(convgrad::xla::CallFrame* frame) {
  using namespace convgrad;
  return asks_only(frame) ? nullptr : answer(*frame, -1, nullptr);
}

EXPORT convgrad::xla::Error* convgrad_xla_cuda(convgrad::xla::CallFrame* frame) {
  using namespace convgrad;
  if (asks_only(frame)) return nullptr;
  const xla::Api& api = *frame->api;
  xla::StreamGet stream = {sizeof(stream), nullptr, frame->context, nullptr};
  if (xla::Error* error = api.stream_get(&stream)) return error;
  xla::DeviceGet device = {sizeof(device), nullptr, frame->context, 0};
  if (xla::Error* error = api.device_get(&device)) return error;
  return answer(*frame, device.ordinal, stream.stream);
}

// Remembers the call that Python is answering in this thread. Returns whether it could; then the
// entry must stay alive for good.
EXPORT int convgrad_xla_remember(convgrad::XlaEntry* entry) {
  using namespace convgrad;
  return asked != nullptr && xla_table.keep(*asked, &entry->kept);
}
