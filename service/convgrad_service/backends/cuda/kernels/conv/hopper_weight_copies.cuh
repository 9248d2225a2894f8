// The ring of steps in shared memory of hopper_weight.cu, and the threads that fill it.
#pragma once

#include "conv/hopper_weight_units.cuh"


namespace convgrad {

// Stages one after another, each with a barrier that completes when it is full, and one when it is
// empty. Whoever uses it walks over it alone.
struct Ring {
  u32 at, stage_bytes, full, empty;
  int stages;
  int stage = 0;
  u32 parity = 0;

  __device__ __forceinline__ u32 here() const { return at + stage * stage_bytes; }
  __device__ __forceinline__ u32 filled(int of) const { return full + of * 8; }
  __device__ __forceinline__ u32 emptied(int of) const { return empty + of * 8; }
  __device__ __forceinline__ void next() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// A box of either operand, and where in a stage it goes.
struct Copied {
  Source from;
  u32 to;
  bool of_y, shared;
};

// How a step lies in a stage: boxes of y, then of x.
template <int kYBoxes_, int kYChannels_, int kItemBytes>
struct Step {
  static constexpr int kYBoxes = kYBoxes_, kYChannels = kYChannels_;
  static constexpr u32 kYBoxBytes = kPixels * kYChannels * kItemBytes;
  static constexpr u32 kXAt = kYBoxes * kYBoxBytes;
};

// Copies a unit's steps, this thread's turn of kTurns that do so together: a thread starts a copy in
// 100 ns. Of what kCluster blocks of a cluster share, from `first_block` on, each copies a part, to all
// of them. `own` has room for a turn's boxes.
template <class Step, int kCluster, int kTurns, class UnitOf>
__device__ __forceinline__ void copy_steps(const HopperWeightArgs& args, const UnitOf& unit_of,
                                           int number, Ring& ring,
                                           int turn, int block, int first_block,
                                           u32 x_box_bytes, Copied* own) {
  const WeightResult& of = args.result;
  const bool y_shared = kCluster > 1 && !of.rows_first, x_shared = kCluster > 1 && of.rows_first;
  auto copied_of = [&](int boxes, bool shared) {
    return shared ? (boxes - block + kCluster - 1) / kCluster : boxes;
  };
  const int of_y = copied_of(Step::kYBoxes, y_shared), all = of_y + copied_of(of.boxes, x_shared);
  // All of its units are so: a thread that waited for stages and copied nothing might be overtaken.
  if (turn > 0 && turn >= all) return;
  const Place place = place_of(of, unit_of(opaque_value(number)).tile);
  int count = 0;
#pragma unroll 1
  for (int index = turn; index < all; index += kTurns) {
    const bool is_y = index < of_y, shared = is_y ? y_shared : x_shared;
    const int in_turn = is_y ? index : index - of_y, i = shared ? in_turn * kCluster + block : in_turn;
    Source source = {(place.row * Step::kYBoxes + i) * Step::kYChannels, 0, 0, 0};
    if (!is_y) source = source_of(args, place.column, i);
    own[count++] = {source, is_y ? i * Step::kYBoxBytes : Step::kXAt + i * x_box_bytes, is_y, shared};
  }
  // There are few registers: not worked out before.
  const Unit unit = unit_of(number);
  Walk walk(args, unit.step);
  for (int step = unit.step; step < unit.end; ++step, walk.next(args)) {
    const u32 to = ring.here(), arrived = ring.filled(ring.stage);
    const Pixel corner = corner_of(args, walk.at);
    mbarrier_wait(ring.emptied(ring.stage), ring.parity ^ 1);
    if (turn == 0) mbarrier_arrive_expect_tx(arrived, args.step_bytes);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const Copied one = own[i];
      const TensorMap& map = one.of_y ? args.y_map : args.x_map;
      const Pixel at = one.of_y ? walk.at : corner;
      if (kCluster > 1 && one.shared) {
        load_box<kCluster>(args, map, to + one.to, arrived, at, one.from, first_block);
      } else {
        load_box(args, map, to + one.to, arrived, at, one.from);
      }
    }
    ring.next();
  }
}

}  // namespace convgrad
