// Average pooling over 3x3 windows that slide by one position, channels first, in types of 16 bits. Launched by
// window_planes.py.
//
// y[o] = (sum of x[i] over the window of o) / divisor(o); with WEIGHTED the terms are x[i] / size(i), for
// gradients of windows that differ in size.
//
// A block computes a tile of y from the box of x that its windows cover (window_box.cuh). A thread walks along
// `run` positions of axis 1, in a pair of adjacent columns, the first of which is even, and in two planes. It
// reads a line of both windows as words and reduces it once, for all windows of its run. Adjacent threads have
// adjacent pairs.
// Whether a line, or a result, starts at a word depends on whether lines and planes have an odd number of
// elements, and then on the line and on the plane: there is a loop for each case. Elements beside x are masked.
// STAGED: whole planes, whose results are stored in shared memory first, and from there in 16-byte chunks;
// lines of an odd number of elements are computed only so.
// Block: 256 threads. Dynamic shared memory: a chunk, the box of x, with STAGED y, with WEIGHTED a weight per
// column, line and slice of the box. Deterministic: the order of additions follows from the windows.
// Preconditions: planes of one slice; tiles that are cut have even lines and columns; lines of x and y are both
// odd or both even, and if they are odd, so are planes. Index limits: planes, and elements of a tile, below
// 2^31; offsets in 64 bits.
#include "pool/window_box.cuh"
#include "ptx/shared_element.cuh"
#include "ptx/word_keys.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
constexpr int kLines = 3, kPlanes = 2, kPair = 2, kTaps = kLines + kPair - 1;

template <int n>
struct Constant {
  static constexpr int value = n;
};

// The element in the high half of a word.
__device__ __forceinline__ float widen_high(u32 word) {
  return widen(T{static_cast<unsigned short>(word >> 16)});
}

#if STAGED
using Address = u32;  // in shared memory
#else
using Address = u64;
#endif

// The sums of a line's part of the windows.
struct Line {
  float of[kPlanes][kPair];
  float weight;
};

// What a thread reads and writes.
struct Walk {
  u32 x;              // the first tap of the first plane, in shared memory
  u32 low[kTaps];     // 2^16 for an element that exists, which as a factor moves it to the high half; else 0
  u32 high[kTaps];    // the high half for an element that exists; else 0
  float weights[kTaps];
  int at, end;        // positions of y
  Address y[kPlanes];
  u32 target;         // the position of y in a plane
  int left;           // planes
  bool pair;          // whether the second column exists

  // `kOdd`: whether the first tap is in the high half of a word.
  // Zero for a line that does not exist.
  template <int kOdd>
  __device__ __forceinline__ void line(bool exists, u32 from, float (&sums)[kPair]) const {
    u32 words[3] = {};
#pragma unroll
    for (int w = 0; w < 2 + kOdd; ++w) {
      if (exists) words[w] = element_at<u32>(from + w * 4 - kOdd * 2);
    }
    float taps[kTaps];
#pragma unroll
    for (int t = 0; t < kTaps; ++t) {
      const u32 word = words[(t + kOdd) / 2];
      taps[t] = widen_high((t + kOdd) % 2 == 0 ? word * low[t] : word & high[t]);
    }
#pragma unroll
    for (int v = 0; v < kPair; ++v) {
#if WEIGHTED
      sums[v] = taps[v] * weights[v];
      sums[v] = fmaf(taps[v + 1], weights[v + 1], sums[v]);
      sums[v] = fmaf(taps[v + 2], weights[v + 2], sums[v]);
#else
      sums[v] = taps[v] + taps[v + 1] + taps[v + 2];
#endif
    }
  }
  // `kOdd`: whether the result of the first column is in the high half of a word. kBoth: whether all pairs have two
  // columns.
  template <int kOdd, bool kBoth>
  __device__ __forceinline__ void store(int plane, const float (&means)[kPair]) const {
    [[maybe_unused]] const u32 word = narrow_x2<T>(means[0], means[1]);
    const T first = narrow<T>(means[0]), second = narrow<T>(means[1]);
#if STAGED
    const u32 to = y[plane] + target * 2;
    if (!kOdd && (kBoth || pair)) {
      store_element(to, word);
      return;
    }
    store_element(to, first);
    if (kOdd && pair) store_element(to + 2, second);
#else
    char* const to = reinterpret_cast<char*>(y[plane] + static_cast<u64>(target) * 2);
    const bool wanted = plane < left;
    if (!kOdd) store_if(wanted & (kBoth | pair), to, word);
    if (kOdd || !kBoth) store_if(wanted & (kOdd | !pair), to, first.bits);
    if (kOdd) store_if(wanted & pair, to + 2, second.bits);
#endif
  }
};

// `kOddLine`, `kOddPlane`: whether they have an odd number of elements. `kFirst`: whether the first tap of the
// first line, in the first plane, is in the high half of a word.
template <int kOddLine, int kOddPlane, int kFirst>
__device__ __forceinline__ void walk(const BoxArgs& args, const Box& box, const float* line_weights, Walk& own,
                                     int o2) {
  const WindowArgs& windows = args.windows;
  const WindowRange& sliding = windows.window[1];
  // The next line of x, and how many there are, both from the first one that exists.
  int next = own.at + sliding.first - sliding.low;
  const int lines = sliding.high - sliding.low, pitch = args.pitch[2] * 2;
  const auto keep = [&](auto parity, Line& line) {
    constexpr int kOdd = decltype(parity)::value;
    const bool exists = static_cast<u32>(next) < static_cast<u32>(lines);
    own.line<kOdd>(exists, own.x, line.of[0]);
    own.line<kOdd ^ kOddPlane>(exists, own.x + args.pitch[0] * 2, line.of[1]);
#if WEIGHTED
    line.weight = exists ? line_weights[next + sliding.low - box.first[1]] : 0.0f;
#endif
    advance(own.x, pitch);
    ++next;
  };
  float by[kPair], reciprocals[kPair];
  int size1 = -1;
#pragma unroll
  for (int v = 0; v < kPair; ++v) reciprocals[v] = static_cast<float>(windows.reciprocal);
  const auto finish = [&](auto parity, const Line& first, const Line& second, const Line& third) {
    constexpr int kOdd = decltype(parity)::value;
    if (windows.by_outputs) {
      const int size = window_size<true>(windows.counted[1], own.at);
      if (size != size1) {
#pragma unroll
        for (int v = 0; v < kPair; ++v) {
          by[v] = static_cast<float>(size) * static_cast<float>(window_size<true>(windows.counted[2], o2 + v));
          reciprocals[v] = 1.0f / by[v];
        }
      }
      size1 = size;
    }
    float means[kPlanes][kPair];
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) {
#pragma unroll
      for (int v = 0; v < kPair; ++v) {
#if WEIGHTED
        float sum = first.of[p][v] * first.weight;
        sum = fmaf(second.of[p][v], second.weight, sum);
        sum = fmaf(third.of[p][v], third.weight, sum);
#else
        const float sum = first.of[p][v] + second.of[p][v] + third.of[p][v];
#endif
        // A sum of negative zeros is zero.
        means[p][v] = fmaf(sum, reciprocals[v], 0.0f);
      }
    }
    own.store<kOdd, !kOddLine>(0, means[0]);
    own.store<kOdd ^ kOddPlane, !kOddLine>(1, means[1]);
    advance(own.target, windows.y_size[2]);
    ++own.at;
  };
  // Of lines of y and of x, in the first plane: whether they start in the high half of a word.
  using Even = Constant<0>;
  using Odd = Constant<kOddLine>;
  using First = Constant<kFirst>;
  using Second = Constant<kFirst ^ kOddLine>;
  // The position whose windows have two lines and a next one; returns whether there was one.
  const auto turn = [&](auto x, auto y, const Line& first, const Line& second, Line& third) {
    if (own.at >= own.end) return false;
    keep(x, third);
    finish(y, first, second, third);
    return true;
  };
  Line a, b, c;
  keep(First(), a);
  keep(Second(), b);
#pragma unroll 1
  for (;;) {
    if (!turn(First(), Even(), a, b, c) || !turn(Second(), Odd(), b, c, a) || !turn(First(), Even(), c, a, b)) return;
    if (!kOddLine) continue;
    if (!turn(Second(), Odd(), a, b, c) || !turn(First(), Even(), b, c, a) || !turn(Second(), Odd(), c, a, b)) return;
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kBoxThreads, WEIGHTED ? 3 : 4)
    window_pairs(const __grid_constant__ BoxArgs args) {
  extern __shared__ __align__(16) unsigned char shared[];
  const WindowArgs& windows = args.windows;
  const Box box(args);
  const float* line_weights = nullptr;
#if WEIGHTED
  float* weights = reinterpret_cast<float*>(shared + args.weights_at);
#pragma unroll
  for (int axis = 2; axis > 0; --axis) {
    for (int i = static_cast<int>(threadIdx.x); i < box.extent[axis]; i += kBoxThreads) {
      weights[i] = 1.0f / static_cast<float>(window_size<true>(windows.counted[axis], box.first[axis] + i));
    }
    weights += args.box[axis];
  }
  const float* const column_weights = reinterpret_cast<const float*>(shared + args.weights_at);
  line_weights = column_weights + args.box[2];
#endif
  const int runs = (args.tile[1] + windows.run - 1) / windows.run, pairs = (args.tile[2] + 1) / kPair;
  const int outputs = windows.y_size[1] * windows.y_size[2];
  const bool odd_line = windows.x_size[2] % 2 == 1, odd_plane = odd_line && windows.x_size[1] % 2 == 1;
  const int lead = windows.window[2].first + (odd_line ? windows.window[1].first : 0);
  // A word may start before the first element.
  const u32 x = shared_address(box.load<T>(args, windows.x, shared + 16));
  cp_async_wait<0>();
  __syncthreads();
  const int items = (box.planes + kPlanes - 1) / kPlanes * runs * pairs;
  const i64 begin = static_cast<i64>(box.plane) * outputs;
#if STAGED
  T* const y = reinterpret_cast<T*>(shared + args.y_at) + static_cast<int>(begin % (16 / sizeof(T)));
#else
  T* const y = static_cast<T*>(windows.y) + begin;
#endif
#pragma unroll 1
  for (int item = static_cast<int>(threadIdx.x); item < items; item += kBoxThreads) {
    const int above = divide(item, args.by_tile[2]), at2 = (item - above * pairs) * kPair;
    const int group = divide(above, args.by_tile[1]), at1 = (above - group * runs) * windows.run;
    const int plane = group * kPlanes, o2 = box.base[2] + at2;
    if (at1 >= box.count[1] || at2 >= box.count[2]) continue;
    const WindowRange& columns = windows.window[2];
    Walk own;
    own.at = box.base[1] + at1;
    own.end = box.base[1] + min(at1 + windows.run, box.count[1]);
    const int first1 = own.at + windows.window[1].first - box.first[1];
    const int first2 = o2 + columns.first - box.first[2];
    own.x = x + group * args.padded + (plane * args.pitch[0] + first1 * args.pitch[2] + first2) * 2;
#pragma unroll
    for (int t = 0; t < kTaps; ++t) {
      const int column = o2 + columns.first + t;
      const bool exists = column >= columns.low && column < columns.high;
      own.low[t] = exists ? 1 << 16 : 0;
      own.high[t] = exists ? 0xffffu << 16 : 0;
#if WEIGHTED
      own.weights[t] = exists ? column_weights[first2 + t] : 0.0f;
#endif
    }
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) {
#if STAGED
      own.y[p] = shared_address(y) + (plane + p) * outputs * 2;
#else
      own.y[p] = reinterpret_cast<u64>(y + static_cast<i64>(plane + p) * outputs);
      asm volatile("" : "+l"(own.y[p]));  // the compiler would otherwise compute it for each store
#endif
    }
    own.target = static_cast<u32>(own.at * windows.y_size[2] + o2);
    own.left = box.planes - plane;
    own.pair = at2 + 1 < box.count[2];
    if (!odd_line) {
      if (lead % 2 == 0) {
        walk<0, 0, 0>(args, box, line_weights, own, o2);
      } else {
        walk<0, 0, 1>(args, box, line_weights, own, o2);
      }
      continue;
    }
#if STAGED
    if (odd_plane) {
      if (lead % 2 == 0) {
        walk<1, 1, 0>(args, box, line_weights, own, o2);
      } else {
        walk<1, 1, 1>(args, box, line_weights, own, o2);
      }
    } else if (lead % 2 == 0) {
      walk<1, 0, 0>(args, box, line_weights, own, o2);
    } else {
      walk<1, 0, 1>(args, box, line_weights, own, o2);
    }
#endif
  }
#if STAGED
  __syncthreads();
  box.store<T>(args, windows.y, y, [](T element) { return element; });
#endif
}
