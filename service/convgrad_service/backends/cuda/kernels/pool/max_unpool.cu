// Max unpooling with indices that may be outside the windows of their pooling, and its gradient. Launched by
// max_unpool.py.
//
// SCATTER 1: y = 0, then y[indices[i]] = x[i] in the order of i, so that the last one wins. Returns
// at once if bad[1] is 0, because window_routes.cu has then unpooled by windows. Channels first: a
// warp processes a plane, 32 elements at a time, of which the last one of each index writes. Channels
// last (INNER): a thread processes a plane. An index outside its plane is skipped and sets bad[0].
// SCATTER 0: y[i] = x[indices[i]], or 0 and bad[0] = 1 if the index is outside the plane; four
// elements per thread, 256 apart.
// Block: 128 threads (scatter), 256 (gather); shared memory: none. Deterministic: one thread or one
// warp writes a plane, in order.
// Index limits: planes and a chunk's elements below 2^31; offsets in 64 bits.
#include "pool/windows.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
constexpr int kAtOnce = 4;

struct UnpoolArgs {
  const void* x;
  void* y;
  const void* indices;
  u64* bad;
  int size;   // positions in a plane of indices, and in a plane that they index
  int plane;
  int inner;
  int batch;
  int chunk;     // gather: of the batch, one a blockIdx.y
  int elements;  // in a chunk's indices
  int wide_indices;  // of 64 bits, else of 32
  Divider by_size, by_inner;  // size * inner, inner
};

}  // namespace

#if SCATTER
extern "C" __global__ void __launch_bounds__(128)
    max_unpool(const __grid_constant__ UnpoolArgs args) {
  if (args.bad[1] == 0) return;
  constexpr int kLanes = INNER ? 1 : 32;
  const i64 own = (static_cast<i64>(blockIdx.x) * 128 + threadIdx.x) / kLanes;
  if (own >= static_cast<i64>(args.batch) * args.inner) return;
  const int lane = INNER ? 0 : static_cast<int>(threadIdx.x) % 32;
  i64 channel;
  const i64 image = divide(own, args.inner, channel);
  const i64 from = image * args.size * args.inner + channel;
  const T* const x = static_cast<const T*>(args.x) + from;
  T* const y = static_cast<T*>(args.y) + image * args.plane * args.inner + channel;
  for (i64 at = lane; at < args.plane; at += kLanes) y[at * args.inner] = {};
  if constexpr (!INNER) __syncwarp();
  for (i64 first = 0; first < args.size; first += kAtOnce * kLanes) {
    int index[kAtOnce];
    T values[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const i64 at = first + u * kLanes + lane;
      const bool there = at < args.size;
      Indices<1> found;
      if (there) found.load(args.indices, from + at * args.inner, args.wide_indices);
      values[u] = there ? x[at * args.inner] : T{};
      index[u] = there ? found.at(0, args.wide_indices) : -1;
      const bool good = index[u] >= 0 && index[u] < args.plane;
      if (!good) index[u] = -1;
      if (there && !good) args.bad[0] = 1;
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      bool last = index[u] >= 0;
      if constexpr (!INNER) {
        const unsigned alike = __match_any_sync(0xffffffffu, index[u]);
        last &= alike >> lane == 1;
      }
      if (last) y[static_cast<i64>(index[u]) * args.inner] = values[u];
      if constexpr (!INNER) __syncwarp();
    }
  }
}

#else
extern "C" __global__ void __launch_bounds__(256)
    max_unpool(const __grid_constant__ UnpoolArgs args) {
  const i64 chunk = static_cast<i64>(blockIdx.y) * args.chunk;
  const i64 lead = chunk * args.size * args.inner;
  const T* const x = static_cast<const T*>(args.x) + chunk * args.plane * args.inner;
  T* const y = static_cast<T*>(args.y) + lead;
  const i64 first = static_cast<i64>(blockIdx.x) * (256 * kAtOnce) + threadIdx.x;
  const i64 rest = (args.batch - chunk) * args.size * args.inner;
  const i64 end = min(static_cast<i64>(args.elements), rest);
  Indices<1> found[kAtOnce];
#pragma unroll
  for (int u = 0; u < kAtOnce; ++u) {
    if (first + u * 256 < end) found[u].load(args.indices, lead + first + u * 256, args.wide_indices);
  }
#pragma unroll
  for (int u = 0; u < kAtOnce; ++u) {
    if (first + u * 256 >= end) continue;
    const int element = static_cast<int>(first) + u * 256;
    const int image = divide(element, args.by_size);
    const int channel = element - divide(element, args.by_inner) * args.inner;
    const int index = found[u].at(0, args.wide_indices);
    const bool good = index >= 0 && index < args.plane;
    if (!good) args.bad[0] = 1;  // all writers write the same value
    T value = {};
    if (good) {
      value = x[(static_cast<i64>(image) * args.plane + index) * args.inner + channel];
    }
    y[element] = value;
  }
}
#endif
