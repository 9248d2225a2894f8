// fprop or dgrad with few channels of the result by FMA, in any layout. Launched by few_gather.py.
//
//   result[n, c, m] = sum over taps j and channels k of source[n, k, x0 + m*x_step + j*x_tap] * weight[k, c, j],
// in each phase (conv/implicit_gemm_args.cuh). A layer with so few channels is limited by memory, and columns of a GEMM's
// tile would be empty.
//
// Grid: phases (fastest), tiles of 256 * PIXELS positions of a phase.
// Block: 256 threads, each with PIXELS positions, 256 apart, of which it has all CHANNELS sums in registers. Weights of the
//   phase are in shared memory as [tap][k][c], read by all lanes at once. Channels of the source are taken by kDepth for
//   all taps, so that the taps' loads meet in L1: VECTOR adjacent channels at a time.
// Shared memory (dynamic): taps of the largest phase * channels of the source * kPitch floats.
// Determinism: one order of additions per result.
// Limits: positions of a phase below 2^31; 64-bit offsets.
#include "conv/implicit_gemm_args.cuh"
#include "core/epilogue.cuh"
#include "core/vectors.cuh"

using namespace convgrad;

// Strides count elements.
struct FewGatherArgs {
  const void* source;
  const void* weight;
  void* result;
  const void* accumulate;  // like the result, or null
  const void* bias;        // one per channel of the result, or null
  i64 source_stride[5];    // N C D H W
  i64 result_stride[5];
  i64 weight_stride[5];    // channels of the source and of the result, T R S
  int source_channels, result_channels;
  int batch;
  int activation;
  float alpha, beta;
  GatherAxis axis[3];
  GatherPhase phase[kMaxPhases][3];
};

namespace {

using T = ELEMENT;
constexpr int kThreads = 256;
constexpr int kPitch = CHANNELS == 3 ? 4 : CHANNELS;
constexpr int kDepth = VECTOR == 1 ? 16 : 2 * VECTOR;
// Blocks of an SM, by the registers that they need.
constexpr int kResident = PIXELS > 1 || (CHANNELS == 3 && sizeof(T) == 2) ? 2 : 3;
// Loads in flight: half as many on GPUs other than Hopper, where more would spill registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
constexpr int kInFlight = VECTOR > 1 ? 1 : PIXELS == 1 ? 4 : 2;
#else
constexpr int kInFlight = VECTOR > 1 ? 2 : PIXELS == 1 ? 8 : 4;
#endif

// A result channel's weights of one channel of the source: one load, or two.
struct Weights {
  float of[kPitch];

  __device__ __forceinline__ explicit Weights(const float* from) {
    if constexpr (kPitch % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kPitch / 4; ++i) {
        const float4 four = reinterpret_cast<const float4*>(from)[i];
        of[4 * i] = four.x, of[4 * i + 1] = four.y, of[4 * i + 2] = four.z, of[4 * i + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kPitch; ++i) of[i] = from[i];
    }
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, kResident)
    few_gather(const __grid_constant__ FewGatherArgs args) {
  extern __shared__ uint4 shared[];
  float* const weights = reinterpret_cast<float*>(shared);
  const GatherAxis &depth = args.axis[0], &height = args.axis[1], &width = args.axis[2];
  const int phases_hw = height.phases * width.phases, phases = depth.phases * phases_hw;
  const int tile = blockIdx.x / phases;
  int rest = blockIdx.x - tile * phases;
  const GatherPhase& along_d = args.phase[rest / phases_hw][0];
  rest %= phases_hw;
  const GatherPhase& along_h = args.phase[rest / width.phases][1];
  const GatherPhase& along_w = args.phase[rest % width.phases][2];
  const int source_channels = args.source_channels;

  const int taps = along_d.taps * along_h.taps * along_w.taps;
  const T* const weight = static_cast<const T*>(args.weight);
  for (int i = threadIdx.x; i < taps * source_channels * kPitch; i += kThreads) {
    const int c = i % kPitch, outer = i / kPitch, tap = outer / source_channels, k = outer - tap * source_channels;
    const int d = divide(divide(tap, along_w.by_taps), along_h.by_taps);
    const int of_hw = tap - d * along_h.taps * along_w.taps;
    const int h = divide(of_hw, along_w.by_taps), w = of_hw - h * along_w.taps;
    weights[i] = c < args.result_channels
                     ? widen(weight[k * args.weight_stride[0] + c * args.weight_stride[1] +
                                    (along_d.r0 + d * depth.r_step) * args.weight_stride[2] +
                                    (along_h.r0 + h * height.r_step) * args.weight_stride[3] +
                                    (along_w.r0 + w * width.r_step) * args.weight_stride[4]])
                     : 0;
  }
  __syncthreads();

  const T* from[PIXELS];
  i64 to[PIXELS];
  int at_d[PIXELS], at_h[PIXELS], at_w[PIXELS];
  bool there[PIXELS];
  const int count = args.batch * along_d.count * along_h.count * along_w.count;
#pragma unroll
  for (int i = 0; i < PIXELS; ++i) {
    const int index = (tile * PIXELS + i) * kThreads + threadIdx.x;
    there[i] = index < count;
    int outer = divide(there[i] ? index : 0, along_w.by_count);
    const int w = (there[i] ? index : 0) - outer * along_w.count;
    int next = divide(outer, along_h.by_count);
    const int h = outer - next * along_h.count;
    const int n = divide(next, along_d.by_count), d = next - n * along_d.count;
    at_d[i] = along_d.x0 + d * depth.x_step;
    at_h[i] = along_h.x0 + h * height.x_step;
    at_w[i] = along_w.x0 + w * width.x_step;
    from[i] = static_cast<const T*>(args.source) + n * args.source_stride[0] + at_d[i] * args.source_stride[2] +
              at_h[i] * args.source_stride[3] + at_w[i] * args.source_stride[4];
    to[i] = n * args.result_stride[0] + (along_d.y0 + d * depth.y_step) * args.result_stride[2] +
            (along_h.y0 + h * height.y_step) * args.result_stride[3] +
            (along_w.y0 + w * width.y_step) * args.result_stride[4];
  }

  float sum[PIXELS][CHANNELS] = {};
#pragma unroll 1
  for (int first = 0; first < source_channels; first += kDepth) {
    const int last = min(first + kDepth, source_channels);
    const float* of_tap = weights;
#pragma unroll 1
    for (int d = 0; d < along_d.taps; ++d) {
#pragma unroll 1
      for (int h = 0; h < along_h.taps; ++h) {
#pragma unroll 1
        for (int w = 0; w < along_w.taps; ++w, of_tap += source_channels * kPitch) {
          const int by_d = d * depth.x_tap, by_h = h * height.x_tap, by_w = w * width.x_tap;
          const i64 beyond = by_d * args.source_stride[2] + by_h * args.source_stride[3] +
                             by_w * args.source_stride[4] + first * args.source_stride[1];
          bool inside[PIXELS];
#pragma unroll
          for (int i = 0; i < PIXELS; ++i) {
            inside[i] = there[i] && static_cast<u32>(at_d[i] + by_d) < static_cast<u32>(depth.size) &&
                        static_cast<u32>(at_h[i] + by_h) < static_cast<u32>(height.size) &&
                        static_cast<u32>(at_w[i] + by_w) < static_cast<u32>(width.size);
          }
          const float* row = of_tap + first * kPitch;
          const T* now[PIXELS];
#pragma unroll
          for (int i = 0; i < PIXELS; ++i) now[i] = from[i] + beyond;
#pragma unroll kInFlight
          for (int k = first; k < last; k += VECTOR) {
            Vector<T, VECTOR> values[PIXELS];
#pragma unroll
            for (int i = 0; i < PIXELS; ++i) {
              values[i] = Vector<T, VECTOR>::zero();
              if (inside[i]) values[i] = Vector<T, VECTOR>::load(now[i]);
              now[i] += VECTOR * args.source_stride[1];
            }
#pragma unroll
            for (int e = 0; e < VECTOR; ++e, row += kPitch) {
              const Weights by(row);
#pragma unroll
              for (int i = 0; i < PIXELS; ++i) {
                const float value = widen(values[i].at[e]);
#pragma unroll
                for (int c = 0; c < CHANNELS; ++c) sum[i][c] = fmaf(value, by.of[c], sum[i][c]);
              }
            }
          }
        }
      }
    }
  }

#pragma unroll
  for (int i = 0; i < PIXELS; ++i) {
    if (!there[i]) continue;
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
      if (c >= args.result_channels) break;
      const i64 element = to[i] + c * args.result_stride[1];
      static_cast<T*>(args.result)[element] = narrow<T>(finish_at<T>(args, sum[i][c], element, c));
    }
  }
}
