// What ptx/tma.cuh and ptx/warpgroup.cuh say that the hardware does, a kernel for each kind of thing;
// test_hopper_instructions.py knows what must come out. One block of 128 threads, or CLUSTER of them.
// Deterministic.
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"

using namespace convgrad;

struct ProbeArgs {
  TensorMap first, second;
  void* out;
  int at[5], by[3];
  int bytes;  // in shared memory
  // Of the operands of a product: rows they start at, rows from eight to the next eight, boxes.
  int shift[2], eight[2], box_bytes[2], boxes[2];
  int depth;
};

namespace {

extern __shared__ uint4 shared[];
__device__ __forceinline__ u32 first_pattern() { return (shared_address(shared) + 1023) & ~1023u; }
template <int kCount>
struct Few {
  int all[kCount];
};

}  // namespace

#ifdef PIXELS
// A box, as it lies in shared memory. Each block of a cluster brings its share to all of them: an
// image, or `by[0]` rows on.
extern "C" __global__ void __launch_bounds__(128) __cluster_dims__(CLUSTER, 1, 1)
    loads(const __grid_constant__ ProbeArgs args) {
  __shared__ u64 barriers[2];
  const u32 to = first_pattern(), full = shared_address(barriers), met = full + 8;
  const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
  if (threadIdx.x == 0) {
    prefetch_tensor_map(args.first);
    mbarrier_init(full, 1);
    mbarrier_init(met, 128 * CLUSTER);
    fence_mbarrier_init();
  }
  cluster_sync();
  if (threadIdx.x < 32 && elect_one()) {
    Few<DIMS> at;
    for (int d = 0; d < DIMS; ++d) at.all[d] = args.at[d];
    mbarrier_arrive_expect_tx(full, args.bytes);
    const u32 share = to + rank * (args.bytes / CLUSTER);
#if PIXELS
    Few<DIMS - 2> by;
    for (int d = 0; d < DIMS - 2; ++d) by.all[d] = args.by[d];
    at.all[DIMS - 1] += rank;
    if (CLUSTER > 1) {
      tma_load_im2col_multicast((1 << CLUSTER) - 1, share, args.first, full, at.all, by.all);
    } else {
      tma_load_im2col(share, args.first, full, at.all, by.all);
    }
#else
    at.all[DIMS - 1] += rank * args.by[0];
    if (CLUSTER > 1) {
      tma_load_multicast((1 << CLUSTER) - 1, share, args.first, full, at.all);
    } else {
      tma_load(share, args.first, full, at.all);
    }
#endif
  }
  mbarrier_wait(full, 0);
  u32* const out = static_cast<u32*>(args.out) + blockIdx.x * (args.bytes / 4);
  for (int i = threadIdx.x; i < args.bytes / 4; i += 128) out[i] = ld_shared_u32(to + i * 4);
  // Everybody arrives everywhere: no block ends while another still uses its barriers.
  for (u32 block = 0; block < CLUSTER; ++block) mbarrier_arrive_cluster(met, block);
  mbarrier_wait(met, 0);
  cluster_sync();
}
#endif

#ifdef STORES
// A box to a tensor, from shared memory as it lies there.
extern "C" __global__ void __launch_bounds__(128)
    stores(const __grid_constant__ ProbeArgs args) {
  __shared__ u64 barrier;
  const u32 from = first_pattern(), full = shared_address(&barrier);
  if (threadIdx.x == 0) {
    mbarrier_init(full, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(full, args.bytes);
    bulk_load(from, args.out, args.bytes, full);
    mbarrier_wait(full, 0);
    Few<DIMS> at;
    for (int d = 0; d < DIMS; ++d) at.all[d] = args.at[d];
    tma_store(args.first, from, at.all);
    tma_store_commit();
    tma_store_wait_read<0>();
    tma_store_wait<0>();
  }
}
#endif

#ifdef SENDS
// Each block of a cluster has as many parts as there are blocks, and sends each its own.
extern "C" __global__ void __launch_bounds__(128) __cluster_dims__(SENDS, 1, 1)
    sends(const __grid_constant__ ProbeArgs args) {
  __shared__ u64 barrier;
  const u32 own = first_pattern(), come = own + args.bytes, full = shared_address(&barrier);
  const u32 rank = cluster_rank(), part = args.bytes / SENDS;
  u32* const out = static_cast<u32*>(args.out) + rank * (args.bytes / 4);
  if (threadIdx.x == 0) {
    mbarrier_init(full, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(full, args.bytes - part);
  }
  for (int i = threadIdx.x; i < args.bytes / 4; i += 128) st_shared_u32(own + i * 4, out[i]);
  fence_proxy_async();
  __syncthreads();
  cluster_arrive();
  cluster_wait();
  if (threadIdx.x == 0) {
    for (u32 to = 0; to < SENDS; ++to) {
      if (to != rank) bulk_copy_to_peer(come + rank * part, own + to * part, part, full, to);
    }
  }
  mbarrier_wait(full, 0);
  cluster_arrive();
  for (int i = threadIdx.x; i < args.bytes / 4; i += 128) {
    const u32 from = i / (part / 4) == rank ? own : come;
    out[i] = ld_shared_u32(from + i * 4);
  }
  cluster_wait();
}
#endif

#ifdef ELEMENT
namespace {

// In boxes of rows of so many bytes.
template <int kBytes, Major kMajor>
__device__ __forceinline__ u64 operand(u32 at, u32 next_box, u32 eight) {
  if constexpr (kMajor == kMajorK) {
    return k_major_descriptor<kBytes>(at, eight);
  } else {
    return mn_major_descriptor<kBytes>(at, next_box, eight);
  }
}

}  // namespace

// c = a * b by one warpgroup: a of 64 rows, b of 8 * FRAGMENTS columns, both in boxes as TMA brings
// them, or a from registers, 32-bit words of its rows at `out`, before c.
extern "C" __global__ void __launch_bounds__(128)
    products(const __grid_constant__ ProbeArgs args) {
  using T = ELEMENT;
  constexpr int kStep = 32 / sizeof(T), kWords = 8;  // of the reduction, in a product
  __shared__ u64 barrier;
  const u32 a_at = first_pattern(), full = shared_address(&barrier);
  const u32 b_at = a_at + args.boxes[0] * args.box_bytes[0];
  if (threadIdx.x == 0) {
    mbarrier_init(full, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(full, b_at - a_at + args.boxes[1] * args.box_bytes[1]);
    for (int i = 0; i < args.boxes[0]; ++i) {
      const int column = i * (SWIZZLE_A / static_cast<int>(sizeof(T)));
      tma_load(a_at + i * args.box_bytes[0], args.first, full, {column, 0});
    }
    for (int i = 0; i < args.boxes[1]; ++i) {
      const int column = i * (SWIZZLE_B / static_cast<int>(sizeof(T)));
      tma_load(b_at + i * args.box_bytes[1], args.second, full, {column, 0});
    }
  }
  __syncthreads();
  mbarrier_wait(full, 0);
  float c[FRAGMENTS][4];
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const u32* const words = static_cast<const u32*>(args.out);
  fence_accumulators(c);
  wgmma_fence();
  for (int step = 0; step < args.depth / kStep; ++step) {
    u64 b = operand<SWIZZLE_B, MAJOR_B>(b_at, args.box_bytes[1], args.eight[1]);
    b = advance_descriptor(b, args.shift[1] * SWIZZLE_B +
                       step * (MAJOR_B == kMajorK ? 32 : 2 * args.eight[1]));
#if REGISTERS
    u32 a[4];
    for (int i = 0; i < 4; ++i) {
      const int row = warp * 16 + lane / 4 + i % 2 * 8, word = lane % 4 + i / 2 * 4;
      a[i] = words[(row * (args.depth / kStep) + step) * kWords + word];
    }
    fence_registers(a);
    wgmma_fence();
    wgmma<T, MAJOR_B>(c, a, b, step > 0);
    wgmma_commit();
    wgmma_wait<0>();
    fence_registers(a);
#else
    u64 a = operand<SWIZZLE_A, MAJOR_A>(a_at, args.box_bytes[0], args.eight[0]);
    a = advance_descriptor(a, args.shift[0] * SWIZZLE_A +
                       step * (MAJOR_A == kMajorK ? 32 : 2 * args.eight[0]));
    wgmma<T, MAJOR_A, MAJOR_B>(c, a, b, step > 0);
#endif
  }
  wgmma_commit();
  wgmma_wait<0>();
  fence_accumulators(c);
  float* const out = static_cast<float*>(args.out) + 64 * (args.depth / kStep) * kWords;
  for (int j = 0; j < FRAGMENTS; ++j) {
    for (int e = 0; e < 4; ++e) {
      const int row = warp * 16 + e / 2 * 8 + lane / 4, column = j * 8 + lane % 4 * 2 + e % 2;
      out[row * 8 * FRAGMENTS + column] = c[j][e];
    }
  }
}
#endif
