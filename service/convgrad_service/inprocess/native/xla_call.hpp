// How XLA's typed FFI calls a handler: what is used here of its C API, xla/ffi/api/c_api.h, which has a
// stable ABI.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace convgrad::xla {

struct Error;
struct Context;

struct Extension {
  size_t struct_size;
  int32_t type;
  Extension* next;
};

constexpr int32_t kMetadata = 1;  // of extensions

struct Version {
  size_t struct_size;
  Extension* extensions;
  int32_t major, minor;
};

struct Metadata {
  size_t struct_size;
  Version version;
  uint32_t traits;  // 1 if calls may be captured in a command buffer, a CUDA graph of XLA's
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

struct ErrorCreate {
  size_t struct_size;
  Extension* extensions;
  const char* message;
  int32_t code;
};

constexpr int32_t kInternal = 13;  // of codes

struct StreamGet {
  size_t struct_size;
  Extension* extensions;
  Context* context;
  void* stream;
};

struct DeviceGet {
  size_t struct_size;
  Extension* extensions;
  Context* context;
  int32_t ordinal;
};

struct Api {
  size_t struct_size;
  Extension* extensions;
  Version version;
  const void* internal;
  Error* (*error_create)(ErrorCreate*);
  void (*error_message)(void*);
  void (*error_destroy)(void*);
  void* handler_register;
  Error* (*stream_get)(StreamGet*);
  void* others[12];
  Error* (*device_get)(DeviceGet*);
};

struct Buffer {
  size_t struct_size;
  Extension* extensions;
  int32_t dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
};

struct Buffers {
  size_t struct_size;
  Extension* extensions;
  int64_t size;
  int32_t* types;
  Buffer** items;
};

struct Text {
  const char* data;
  size_t size;
};

struct Attributes {
  size_t struct_size;
  Extension* extensions;
  int64_t size;
  int32_t* types;
  Text** names;
  void** values;
};

constexpr int32_t kExecute = 3;  // of stages

struct CallFrame {
  size_t struct_size;
  Extension* extensions;
  const Api* api;
  Context* context;
  int32_t stage;
  Buffers arguments, results;
  Attributes attributes;
};

}  // namespace convgrad::xla
