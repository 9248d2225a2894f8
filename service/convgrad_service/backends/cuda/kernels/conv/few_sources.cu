// 1x1 fprop or dgrad with stride 1 and few channels of the source by FMA. Launched by few_sources.py.
//
//   result[n, c, p] = sum over k of source[n, k, p] * weight[k, c].
// The result is most of the memory that such a layer moves; it is stored in vectors of VECTOR elements.
//
// Grid: items by threads of 256; with PLANES also blocks of channels of the result.
// Block: 256 threads. With PLANES, a thread has VECTOR pixels of an image, whose CHANNELS values it keeps in registers, and
//   computes channels of the result one after another; weights are in shared memory. Else channels of the result are
//   contiguous: a thread has VECTOR of them with their weights in registers, at kPixels pixels.
// Shared memory: weights of a block's channels (dynamic).
// Preconditions: with PLANES, pixels of an image are contiguous, in source and result; vectors are aligned.
// Determinism: one order of additions per result.
// Limits: items below 2^31; 64-bit offsets.
#include "core/divider.cuh"
#include "core/epilogue.cuh"
#include "core/vectors.cuh"

using namespace convgrad;

// Strides count elements.
struct FewSourcesArgs {
  const void* source;
  const void* weight;
  void* result;
  const void* accumulate;  // like the result, or null
  const void* bias;        // one per channel of the result, or null
  i64 source_stride[3];    // images, channels, pixels
  i64 result_stride[3];
  i64 weight_stride[2];  // channels of the source, of the result
  int source_channels, result_channels;
  int pixels;       // of an image
  int images;
  int items;        // vectors of pixels, or of channels, of all images
  int channels;     // of the result, that a block has; planes alone
  Divider by_image;  // items of an image, or of a pixel
  int activation;
  float alpha, beta;
};

namespace {

using T = ELEMENT;
constexpr int kThreads = 256, kPixels = 4;
using Some = Vector<T, VECTOR>;

// Rounds and stores sums of adjacent results: of channels from `channel` on, one each, or all of `channel`.
template <bool kOfChannels>
__device__ __forceinline__ void put(const FewSourcesArgs& args, i64 at, int channel, const float (&sum)[VECTOR]) {
  Some done;
#pragma unroll
  for (int e = 0; e < VECTOR; ++e) {
    const T* accumulate = static_cast<const T*>(args.accumulate);
    if (accumulate != nullptr) accumulate += at + e;
    const T* bias = static_cast<const T*>(args.bias);
    if (bias != nullptr) bias += kOfChannels ? channel + e : channel;
    done.at[e] = narrow<T>(finish<T, float>(sum[e], args.alpha, args.beta, accumulate, bias, args.activation));
  }
  done.store(static_cast<T*>(args.result) + at);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    few_sources(const __grid_constant__ FewSourcesArgs args) {
  const T* const source = static_cast<const T*>(args.source);
  const T* const weight = static_cast<const T*>(args.weight);
  const auto weight_of = [&](int k, int c) {
    return k < args.source_channels && c < args.result_channels
               ? widen(weight[k * args.weight_stride[0] + c * args.weight_stride[1]])
               : 0.0f;
  };
#if PLANES
  extern __shared__ uint4 shared[];
  float* const weights = reinterpret_cast<float*>(shared);
  const int first = blockIdx.y * args.channels;
  const int channels = min(args.channels, args.result_channels - first);
  for (int i = threadIdx.x; i < channels * CHANNELS; i += kThreads) {
    weights[i] = weight_of(i % CHANNELS, first + i / CHANNELS);
  }
  __syncthreads();
  const int item = blockIdx.x * kThreads + threadIdx.x;
  if (item >= args.items) return;
  const int n = divide(item, args.by_image), per_image = args.pixels / VECTOR;
  const i64 p = static_cast<i64>(item - n * per_image) * VECTOR;
  Some values[CHANNELS];
#pragma unroll
  for (int k = 0; k < CHANNELS; ++k) {
    values[k] = Some::zero();
    if (k < args.source_channels) {
      values[k] = Some::load(source + n * args.source_stride[0] + k * args.source_stride[1] + p);
    }
  }
  i64 at = n * args.result_stride[0] + first * args.result_stride[1] + p;
#pragma unroll 4
  for (int c = 0; c < channels; ++c, at += args.result_stride[1]) {
    float sum[VECTOR] = {};
#pragma unroll
    for (int k = 0; k < CHANNELS; ++k) {
      const float by = weights[c * CHANNELS + k];
#pragma unroll
      for (int e = 0; e < VECTOR; ++e) sum[e] = fmaf(widen(values[k].at[e]), by, sum[e]);
    }
    put<false>(args, at, first + c, sum);
  }
#else
  // Items are (pixels of all images) x (vectors of channels); a thread's are as far apart as the grid is long.
  const int per_pixel = args.result_channels / VECTOR, step = gridDim.x * kThreads / per_pixel;
  const int thread = blockIdx.x * kThreads + threadIdx.x;
  int pixel = divide(thread, args.by_image);
  const int channel = (thread - pixel * per_pixel) * VECTOR;
  if (pixel >= step) return;
  float by[CHANNELS][VECTOR];
#pragma unroll
  for (int k = 0; k < CHANNELS; ++k) {
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) by[k][e] = weight_of(k, channel + e);
  }
  const int pixels = args.images * args.pixels;
#pragma unroll 1
  for (; pixel < pixels; pixel += kPixels * step) {
    float values[kPixels][CHANNELS];
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      const i64 from = (pixel + static_cast<i64>(i) * step) * args.source_stride[2];
      const bool there = pixel + static_cast<i64>(i) * step < pixels;
#pragma unroll
      for (int k = 0; k < CHANNELS; ++k) {
        values[i][k] = there && k < args.source_channels ? widen(source[from + k * args.source_stride[1]]) : 0;
      }
    }
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      if (pixel + static_cast<i64>(i) * step >= pixels) break;
      float sum[VECTOR] = {};
#pragma unroll
      for (int k = 0; k < CHANNELS; ++k) {
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) sum[e] = fmaf(values[i][k], by[k][e], sum[e]);
      }
      put<true>(args, (pixel + static_cast<i64>(i) * step) * args.result_stride[2] + channel, channel, sum);
    }
  }
#endif
}
