// The first convolution of the fused separable kernels: tables of a tile's pixels, depthwise weights,
// and chunks of the intermediate, by kThreads threads whose own_thread() counts from 0.
#pragma once

#include "fused/fused_depthwise.cuh"
#include "fused/fused_product.cuh"

namespace convgrad {

constexpr int kTables = 4, kRaw = 3;

// Where as many threads compute as multiply, they are the second half of the block.
__device__ __forceinline__ int own_thread() { return threadIdx.x % kThreads; }

// What the threads of a block share, and where each thing is.
struct Shared {
  u32 weights, middle;  // addresses
  unsigned char* middle_at;
  float* taps;         // two chunks, widened
  unsigned char* raw;  // three chunks as they come
  Strip* strips;       // kTables x kPixels
  Corner* corners;     // kTables x kPixels, where no window slides
  i64* outputs;        // kTables x kPixels
  int* counts;         // strips of each table
};

__device__ __forceinline__ int taps_of(const FusedArgs& args) {
  return args.kernel[0] * args.kernel[1] * args.kernel[2];
}

__device__ __forceinline__ Shared shared_of(const FusedArgs& args, unsigned char* memory) {
  const u32 start = shared_address(memory), skip = (1024 - start % 1024) % 1024;
  const int taps = taps_of(args);
  Shared shared;
  shared.weights = start + skip;
  unsigned char* at = memory + skip + args.stages * kWeightBytes;
  shared.middle_at = at;
  shared.middle = shared_address(at);
  at += args.slots * kMiddleBytes;
  shared.taps = reinterpret_cast<float*>(at);
  at += 2 * taps * kChunk * 4;
  shared.raw = at;
  at += kRaw * taps * kChunk * 2;
  shared.outputs = reinterpret_cast<i64*>(at);
  at += kTables * kPixels * 8;
  shared.strips = reinterpret_cast<Strip*>(at);
  at += kTables * kPixels * static_cast<int>(sizeof(Strip));
  shared.corners = reinterpret_cast<Corner*>(at);
  if (WIDTH == 0) at += kTables * kPixels * static_cast<int>(sizeof(Corner));
  shared.counts = reinterpret_cast<int*>(at);
  return shared;
}

// Starts the copy of a chunk's depthwise weights.
__device__ __forceinline__ void copy_taps(const FusedArgs& args, unsigned char* to, int chunk) {
  const int taps = taps_of(args);
  const int left = args.channels - chunk * kChunk;
  const int bytes = (left < kChunk ? left : kChunk) * taps * 2;
  const unsigned char* const from =
      static_cast<const unsigned char*>(args.w0) + static_cast<i64>(chunk) * kChunk * taps * 2;
  for (int at = own_thread() * 16; at < bytes; at += kThreads * 16) {
    copy_async<16>(shared_address(to + at), from + at, bytes - at < 16 ? bytes - at : 16);
  }
}

// From how they come to how they are read: a channel a thread, and every so many taps.
__device__ __forceinline__ void widen_taps(const FusedArgs& args, float* to,
                                           const unsigned char* from, int chunk) {
  const int taps = taps_of(args), channel = own_thread() % kChunk;
  if (chunk * kChunk + channel >= args.channels) return;
  const Element* const raw = reinterpret_cast<const Element*>(from) + channel * taps;
  to += weight_place(channel);
  for (int tap = own_thread() / kChunk; tap < taps; tap += kThreads / kChunk) {
    to[tap * kChunk] = widen(raw[tap]);
  }
}

// Where the pixels of a tile are in y.
__device__ __forceinline__ void find_places(const FusedArgs& args, i64* places, int tile) {
  const Rows rows = rows_of(args, tile, kPixels);
  for (int i = own_thread(); i < kPixels; i += kThreads) places[i] = output_at(args, rows, i);
}

// The strips of a tile, by the last threads first.
__device__ __forceinline__ void find_strips(const FusedArgs& args, const Shared& shared, int tile,
                                            int table) {
  const Rows rows = rows_of(args, tile, kPixels);
  const int strips = min(strips_in(args, rows), kPixels);
  for (int i = kThreads - 1 - own_thread(); i < strips; i += kThreads) {
    Corner corner = {};
    shared.strips[table * kPixels + i] = strip_of(args, rows, i, corner);
    if (WIDTH == 0) shared.corners[table * kPixels + i] = corner;
  }
  if (own_thread() == 0) shared.counts[table] = strips;
}

#if WIDTH == 0
struct Inputs {};
#else
using Inputs = Sliding<Element, WIDTH, STRIDE, ROWS, AHEAD>;
#endif

// Starts the loads of this thread's first strip of a chunk.
__device__ __forceinline__ void fetch_inputs(const FusedArgs& args, const Shared& shared,
                                             Inputs& inputs, int table, int chunk) {
#if WIDTH != 0 && AHEAD != 0
  const int channel = chunk * kChunk + (own_thread() & ((1 << args.lanes) - 1)) * kVector;
  const int i = own_thread() >> args.lanes;
  if (channel >= args.channels || i >= shared.counts[table]) return;
  inputs.fetch(args, shared.strips[table * kPixels + i], channel);
#endif
}

template <class Function>
__device__ __forceinline__ void change_strip(float (&sum)[kStripPixels][kVector],
                                             const float (&bias)[kVector], Function&& function) {
#pragma unroll
  for (int j = 0; j < kStripPixels; ++j) {
#pragma unroll
    for (int e = 0; e < kVector; ++e) sum[j][e] = function(sum[j][e] + bias[e]);
  }
}
__device__ __forceinline__ void finish_strip(float (&sum)[kStripPixels][kVector],
                                             const float (&bias)[kVector], int activation) {
  if (activation == kRelu) {
    change_strip(sum, bias, [](float v) { return activate(v, kRelu); });
  } else if (activation == kRelu6) {
    change_strip(sum, bias, [](float v) { return activate(v, kRelu6); });
  } else if (activation == kSilu) {
    change_strip(sum, bias, [](float v) { return activate(v, kSilu); });
  } else {
    change_strip(sum, bias, [](float v) { return v; });
  }
}

// One chunk of a tile's intermediate, of which the first strips have been fetched.
__device__ __forceinline__ void compute_middle(const FusedArgs& args, const Shared& shared,
                                               Inputs& inputs, int table, int chunk, int slot,
                                               const float* weights) {
  const int vector = own_thread() & ((1 << args.lanes) - 1);
  const int channel = chunk * kChunk + vector * kVector;
  const bool there = channel < args.channels;
  unsigned char* const to = shared.middle_at + slot * kMiddleBytes;
  const Element* const bias0 = static_cast<const Element*>(args.bias0);
  const int strips = shared.counts[table];
  for (int i = own_thread() >> args.lanes; i < strips; i += kThreads >> args.lanes) {
#ifdef MULTIPLIERS
    // Read again where it is needed: registers are few in one of two roles.
    const Strip& strip = shared.strips[table * kPixels + i];
#else
    const Strip strip = shared.strips[table * kPixels + i];
#endif
    float sum[kStripPixels][kVector] = {};
    if (there && strip.count > 0) {
#if WIDTH != 0
      if (i >= kThreads >> args.lanes) inputs.fetch(args, strip, channel);
      inputs.finish(sum, args, strip, channel, weights, vector);
#else
      const Corner corner = shared.corners[table * kPixels + i];
      const Element* const x = static_cast<const Element*>(args.x) + static_cast<int>(strip.at);
      sum_taps(sum, args, corner, strip.count, x + channel, weights, vector);
#endif
    }
    if (there && (bias0 != nullptr || args.activation0 != kNone)) {
      float bias[kVector] = {};
      if (bias0 != nullptr) {
        const auto given = Vector<Element, kVector>::load(bias0 + channel);
#pragma unroll
        for (int e = 0; e < kVector; ++e) bias[e] = widen(given.at[e]);
      }
      finish_strip(sum, bias, args.activation0);
    }
#pragma unroll
    for (int j = 0; j < kStripPixels; ++j) {
      if (j >= strip.count) break;
      u32 packed[kVector / 2];
#pragma unroll
      for (int e = 0; e < kVector; e += 2) {
        packed[e / 2] = narrow_two<Element>(sum[j][e], sum[j][e + 1]);
      }
      const int row = strip.pixel + j;
      *reinterpret_cast<uint4*>(to + row * kRowBytes + (vector ^ (row & 7)) * 16) =
          make_uint4(packed[0], packed[1], packed[2], packed[3]);
    }
  }
}

}  // namespace convgrad
