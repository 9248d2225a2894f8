// hopper_weight.cu's pipeline and its producer threads.
#pragma once

#include "conv/hopper_weight_units.cuh"


namespace convgrad {

// The pipeline's stages with a full and an empty mbarrier each, and this thread's position.
struct Pipeline {
  u32 at, stage_bytes, full, empty;
  int stages;
  int stage = 0;
  u32 parity = 0;

  __device__ __forceinline__ u32 current_stage() const { return at + stage * stage_bytes; }
  __device__ __forceinline__ u32 full_barrier(int of) const { return full + of * 8; }
  __device__ __forceinline__ u32 empty_barrier(int of) const { return empty + of * 8; }
  __device__ __forceinline__ void next() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// A box of either operand, and its offset in a stage.
struct LoadedBox {
  Source from;
  u32 to;
  bool of_y, shared;
};

// Layout of a k-tile in a stage: of each part, boxes of y, then of x.
template <int kYBoxes_, int kYChannels_, int kItemBytes>
struct Step {
  static constexpr int kYBoxes = kYBoxes_, kYChannels = kYChannels_;
  static constexpr u32 kYBoxBytes = kPixels * kYChannels * kItemBytes;
  static constexpr u32 kXAt = kYBoxes * kYBoxBytes;
};

// Loads this producer thread's share of the boxes of a unit's k-tiles: issuing a copy takes 100 ns,
// so several threads divide them. Each of the kCluster blocks starting at `first_block` loads a
// part of the shared boxes by multicast. `own` holds this thread's boxes.
template <class Step, int kCluster, int kProducers, class UnitOf>
__device__ __forceinline__ void load_unit(const HopperWeightArgs& args, const UnitOf& unit_of,
                                           int number, Pipeline& pipeline,
                                           int producer, int block, int first_block,
                                           u32 x_box_bytes, LoadedBox* own) {
  const WeightResult& of = args.result;
  const bool y_shared = kCluster > 1 && !of.rows_first, x_shared = kCluster > 1 && of.rows_first;
  auto copied_of = [&](int boxes, bool shared) {
    return shared ? (boxes - block + kCluster - 1) / kCluster : boxes;
  };
  const int of_y = copied_of(Step::kYBoxes, y_shared), all = of_y + copied_of(of.boxes, x_shared);
  // This holds for all units: a thread that waits for stages but loads nothing could be lapped.
  if (producer > 0 && producer >= all) return;
  const Place place = place_of(of, unit_of(opaque_value(number)).tile);
  int count = 0;
#pragma unroll 1
  for (int index = producer; index < all; index += kProducers) {
    const bool is_y = index < of_y, shared = is_y ? y_shared : x_shared;
    const int in_turn = is_y ? index : index - of_y, i = shared ? in_turn * kCluster + block : in_turn;
    Source source = {place.group * args.y_group + (place.row * Step::kYBoxes + i) * Step::kYChannels, 0, 0, 0};
    if (!is_y) source = source_of(args, place, i);
    own[count++] = {source, is_y ? i * Step::kYBoxBytes : Step::kXAt + i * x_box_bytes, is_y, shared};
  }
  // Not precomputed, to save registers.
  const Unit unit = unit_of(number);
  Walk walk(args, unit.first, unit.stride);
  const u32 part_bytes = args.stage_bytes / PARTS;
  for (int step = 0; step < unit.steps; ++step, walk.next(args)) {
    const u32 to = pipeline.current_stage(), arrived = pipeline.full_barrier(pipeline.stage);
    const Pixel corner = corner_of(args, walk.at);
    mbarrier_wait(pipeline.empty_barrier(pipeline.stage), pipeline.parity ^ 1);
    if (producer == 0) mbarrier_arrive_expect_tx(arrived, args.step_bytes);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const LoadedBox one = own[i];
      const TensorMap* const maps = one.of_y ? args.y_map : args.x_map;
      const Pixel at = one.of_y ? walk.at : corner;
#pragma unroll 1
      for (int part = 0; part < PARTS; ++part) {
        const u32 box = to + one.to + part * part_bytes;
        if (kCluster > 1 && one.shared) {
          load_box<kCluster>(args, maps[part], box, arrived, at, one.from, first_block);
        } else {
          load_box(args, maps[part], box, arrived, at, one.from);
        }
      }
    }
    pipeline.next();
  }
}

}  // namespace convgrad
