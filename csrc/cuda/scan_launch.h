// The choice of a path and its launches, for factored_scan.cu and dense_scan.cu.
#pragma once

#include <limits.h>
#include <math.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "cuda/scan_cluster.h"
#include "cuda/scan_low_rank.h"
#include "cuda/scan_resident.h"
#include "cuda/scan_step.h"

namespace orthokern::cuda {

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t kReservedShared = 1024;  // bytes of each block that the driver reserves
constexpr int64_t kLargestGroup = 40;      // sequences of a resident block; fewer if shared memory is smaller

// Padded N of the resident kernel that serves a call, in units of 16; 0 for none. The kernels with cuts or a leak begin
// at 4.
template <bool kFactored>
int resident_columns(const ScanArgs& a) {
  for (int columns : {2, 4, 8, 10, 12})
    if (a.N <= 16 * columns && columns != (kFactored ? 12 : 10) && !((a.cut || a.leak) && columns == 2)) return columns;
  return 0;
}

// Call f with a compile-time bool or int.
template <class F>
void with_direction(bool backward, F f) {
  if (backward) f(std::integral_constant<bool, true>());
  else f(std::integral_constant<bool, false>());
}
template <int... kValues, class F>
void with_value(int value, F f) {
  (void)((value == kValues && (f(std::integral_constant<int, kValues>()), true)) || ...);
}

// Call f with the ResidentTraits of such a kernel. Of two maps, 10 warps with 16 rows each do not fit into the
// registers, and 8 with 20 do. Above 64 units there are kernels for one activation and one kind of inputs, which have
// fewer branches in a step. They store no `pre`. Calls with `cut` or a leak have separate kernels, for any activation.
template <bool kFactored, bool kBackward, int C, class F>
void with_resident_traits(int group, const ScanArgs& a, F f) {
  constexpr int kWarps = kFactored && C > 8 ? 8 : C, kIdentity = act::Identity::number, kTanh = act::Tanh::number;
  auto call = [&](auto activation, auto inputs) {
    constexpr int kActivation = decltype(activation)::value;
    constexpr ResidentInputs kInputs = decltype(inputs)::value;
    if (group == 1) f(ResidentTraits<kFactored, kBackward, kWarps, C, false, kActivation, kInputs, false>());
    else f(ResidentTraits<kFactored, kBackward, kWarps, C, true, kActivation, kInputs, false>());
  };
  if constexpr (C > 2) {
    if (a.cut || a.leak)
      return f(ResidentTraits<kFactored, kBackward, kWarps, C, true, kAnyActivation, kAnyInputs, true>());
  }
  const bool known = !a.pre && (a.activation == kIdentity || a.activation == kTanh);
  if constexpr (C >= 8) {
    if (known) {
      with_value<kIdentity, kTanh>(a.activation, [&](auto activation) {
        if constexpr (!kBackward) {
          if (a.tokens) return call(activation, std::integral_constant<ResidentInputs, kTokens>());
        }
        call(activation, std::integral_constant<ResidentInputs, kFeatures>());
      });
      return;
    }
  }
  call(std::integral_constant<int, kAnyActivation>(), std::integral_constant<ResidentInputs, kAnyInputs>());
}
template <bool kFactored, class F>
void with_resident_kernel(bool backward, int columns, int group, const ScanArgs& a, F f) {
  with_direction(backward, [&](auto direction) {
    auto choose = [&](auto c) {
      with_resident_traits<kFactored, decltype(direction)::value, decltype(c)::value>(group, a, f);
    };
    if constexpr (kFactored) with_value<2, 4, 8, 10>(columns, choose);
    else with_value<2, 4, 8, 12>(columns, choose);
  });
}
// The fewest sequences of a cluster that form two sets. A set of 8 would leave no registers for the maps, and fewer
// than 4 have little to multiply while the others are in transit.
template <bool kFactored>
constexpr int kLeastOfTwoSets = kFactored ? 8 : 4;

// Call f with the ClusterTraits of such a kernel. Only a group of 8 has precisions below IEEE; tanh has separate
// kernels in IEEE float32, whose steps are shorter.
template <bool kFactored, class F>
void with_cluster_traits(bool backward, int group, int precision, const ScanArgs& a, F f) {
  const bool plain =
      a.activation == act::Tanh::number && a.out && !a.cut && !a.tokens && !a.leak && !a.pre && !a.sums && !a.norms;
  with_direction(backward, [&](auto direction) {
    constexpr bool kBackward = decltype(direction)::value;
    if (precision == kIeee)
      with_value<1, 2, 4, 8>(group, [&](auto g) {
        constexpr int kGroup = decltype(g)::value, kSets = kGroup >= kLeastOfTwoSets<kFactored> ? 2 : 1;
        if (plain) f(ClusterTraits<kFactored, kBackward, kGroup / kSets, kSets, kIeee, act::Tanh::number>());
        else f(ClusterTraits<kFactored, kBackward, kGroup / kSets, kSets, kIeee, kAnyActivation>());
      });
    else
      with_value<kTf32, kBfloat16>(precision, [&](auto p) {
        f(ClusterTraits<kFactored, kBackward, 8, 1, decltype(p)::value, kAnyActivation>());
      });
  });
}

template <bool kFactored>
bool plan_resident(const ScanArgs& a, bool backward, const ScanOverrides& overrides, const DeviceLimits& limits,
                   ScanPlan& plan) {
  const int columns = resident_columns<kFactored>(a);
  if (!columns) return false;
  int blocks = limits.multiprocessors;  // that run at one time
  // Fill the plan for `group` sequences per block; false if their memory does not fit.
  auto fits = [&](int64_t group) {
    bool does = false;
    with_resident_kernel<kFactored>(backward, columns, static_cast<int>(group), a, [&](auto traits) {
      using Traits = decltype(traits);
      plan.group = static_cast<int>(divide_up(group, Traits::kSequences)) * Traits::kSequences;
      plan.blocks = static_cast<int>(divide_up(a.sequences, plan.group));
      plan.sums_rows = plan.blocks * Traits::kSequences;
      plan.shared_bytes = ResidentMemory<Traits>(plan.group, a.tokens, a.leak).total;
      blocks = limits.multiprocessors * Traits::kBlocks;
      const size_t share = limits.shared_per_multiprocessor / Traits::kBlocks - kReservedShared;
      does = plan.shared_bytes <= static_cast<int64_t>(std::min(limits.shared_per_block, share));
    });
    return does;
  };
  int64_t largest = overrides.group ? overrides.group : kLargestGroup;
  while (largest > 0 && !fits(largest)) largest--;
  if (!largest) return false;
  // The fewest sequences per block that keep every multiprocessor busy: a step of two sequences takes longer than a
  // step of one. If one wave of blocks is not enough, all waves are full.
  const int64_t waves = std::max<int64_t>(1, divide_up(a.sequences, largest * blocks));
  if (!overrides.group)
    fits(std::clamp<int64_t>(divide_up(a.sequences, waves * blocks), 1, std::max<int64_t>(1, a.sequences)));
  plan.path = static_cast<int>(ScanPath::kResident);
  plan.norm_columns = plan.blocks;
  return true;
}

// Call f with the LowRankTraits of the kernel for these sizes; false if there is none. Of the shapes that serve a
// rank, the first one with enough units.
template <class F>
bool with_low_rank_kernel(bool backward, const ScanArgs& a, F f) {
  bool called = false;
  auto choose = [&](auto rank, auto units, auto warps) {
    constexpr int kRank = decltype(rank)::value, kUnits = decltype(units)::value, kWarps = decltype(warps)::value;
    if (called || a.K > kRank || a.N > 32 * kUnits * kWarps) return;
    called = true;
    with_direction(backward, [&](auto direction) {
      constexpr bool kBackward = decltype(direction)::value;
      if (a.activation == act::Tanh::number && !a.pre && !a.leak)
        f(LowRankTraits<kBackward, kRank, kUnits, kWarps, act::Tanh::number>());
      else f(LowRankTraits<kBackward, kRank, kUnits, kWarps, kAnyActivation>());
    });
  };
  const std::integral_constant<int, 1> one;
  const std::integral_constant<int, 2> two;
  const std::integral_constant<int, 4> four;
  const std::integral_constant<int, 8> eight;
  choose(eight, four, four);  // more than four warps would issue more than they hide
  choose(eight, eight, eight);
  choose(std::integral_constant<int, 16>(), four, eight);
  choose(std::integral_constant<int, 32>(), two, eight);
  choose(std::integral_constant<int, 64>(), one, eight);
  return called;
}

template <class Traits>
int low_rank_warps(int64_t n) {
  return static_cast<int>(divide_up(n, 32 * Traits::kUnits));
}

// Clocks of a step of one sequence, N <= 1024 and four warps: 2 N K / 128 of multiply-adds, N / 3 of other instructions
// for the units of a scheduler (activation, inputs, results), 70 + 3 K for the sum over the block, and 150 of exposed
// latency (estimates). Blocks of the same multiprocessor hide each other's latency. A step of the resident kernel has 2
// N^2 / 128 of multiply-adds and 530 of latency, one of a cluster 880 for its exchanges alone. So this kernel is used
// for all sizes that it serves, unless the resident kernel multiplies no more than four times as much.
inline bool plan_low_rank(const ScanArgs& a, bool backward, const ScanOverrides& overrides, const DeviceLimits& limits,
                          ScanPlan& plan) {
  bool does = false;
  with_low_rank_kernel(backward, a, [&](auto traits) {
    using Traits = decltype(traits);
    const bool resident = resident_columns<true>(a) && a.N < 4 * Traits::kRank;
    if (a.sequences > INT_MAX || (resident && overrides.path < 0)) return;
    const int warps = low_rank_warps<Traits>(a.N);
    plan.path = static_cast<int>(ScanPath::kLowRank);
    plan.group = 1;
    plan.blocks = plan.norm_columns = plan.sums_rows = static_cast<int>(a.sequences);
    plan.shared_bytes = sizeof(float) * LowRankMemory<Traits>(warps, a.leak).total;
    does = plan.shared_bytes <= static_cast<int64_t>(limits.shared_per_block);
  });
  return does;
}

// Chunks of the maps that are not in registers.
template <class Traits>
int chunks_outside(const ScanPlan& plan) {
  return plan.chunks1 - in_registers(plan.chunks1, Traits::kRegisters1) + plan.chunks2 -
         in_registers(plan.chunks2, Traits::kRegisters2);
}

// Clocks of a step of all sequences on clusters: multiply-adds, or tensor cores (8 clocks of a scheduler for each of
// their products), and shared memory at 128 bytes a clock; the sums that lanes or warps exchange; and the exchange of a
// vector between blocks, 440 clocks and one for each 18 bytes. An H200 takes 1.5 times the sum of these, and reads from
// L2 at 46 bytes a clock besides; sequences that do not form two sets wait 1300 clocks for other blocks. The
// constants are fitted to N = 500 and 1000, dense and factored, B = 50 (docs/gpu.md). Whole calls of several waves, in
// IEEE float32 or bfloat16, agree with them within a tenth.
template <class Traits>
double cluster_clocks(const ScanPlan& plan, int clusters, int64_t sequences) {
  const int chunks = plan.chunks1 + plan.chunks2, outside = chunks_outside<Traits>(plan);
  const double chunk_bytes = 4.0 * Traits::kChunkWords, outputs = Traits::kFactored ? 2 : 1;
  const int on_tensor_cores = Traits::kVectors * 8 * kClusterWarps / 4;
  const double multiply = chunks * (Traits::kTensor ? on_tensor_cores : kClusterRows * Traits::kSequences);
  const double of_state = 4.0 * Traits::kSequences * (Traits::kTensor ? 1 : kClusterWarps);  // for each chunk
  const double shared = outside * chunk_bytes / 128 + chunks * of_state;
  const double from_l2 = (outside - plan.shared_chunks) * chunk_bytes / 46;
  const double sums = Traits::kTensor ? 350 : kClusterRows * Traits::kSequences / 2;
  const double vectors = 4.0 * kChunk * Traits::kSequences * chunks, exchanges = outputs * 440 + vectors / 18;
  const int64_t waves = divide_up(divide_up(sequences, Traits::kSequences), clusters);
  const double wait = Traits::kSets == 1 ? 1300 : 0;
  return static_cast<double>(waves) *
         (1.5 * (std::max(multiply, shared) + outputs * sums + exchanges) + from_l2 + wait);
}

// Clocks of a step of all sequences with library products, IEEE or TF32, and a kernel: launches, then the columns of a
// product one after another, or its multiply-adds. Fitted to whole calls of an H200 with N = 256 to 1024 and B = 512
// and 2048 (docs/gpu.md), without the products of their gradients; those of smaller batches to the steps of cuDNN.
template <bool kFactored>
double library_clocks(const ScanArgs& a, const DeviceLimits& limits) {
  const bool two = kFactored && 2 * a.K <= a.N;
  const double columns = static_cast<double>(two ? a.N + a.K : a.N), of_all = static_cast<double>(a.sequences);
  const double rate = limits.multiprocessors * (a.precision == kIeee ? 128 * 0.6 : 300);
  const double multiply = of_all * a.N * (two ? 2 * a.K : a.N) / rate;
  return (two ? 33000 : 29000) + std::max((a.precision == kIeee ? 27 : 8) * columns, multiply);
}

// Fill the plan for clusters of plan.cluster blocks of these Traits: with as many chunks in shared memory as fit.
// Returns how many such clusters the device holds at one time; 0 leaves the plan as it is.
template <class Traits>
int fit_cluster(const ScanArgs& a, const ScanOverrides& overrides, const DeviceLimits& limits, ScanPlan& plan) {
  const int rest = chunks_outside<Traits>(plan);
  int shared_chunks = overrides.shared_chunks < 0 ? rest : std::min(overrides.shared_chunks, rest);
  auto bytes = [&] {
    return ClusterMemory<Traits>(plan.chunks1 * kChunk, plan.chunks2 * kChunk, shared_chunks, shared_chunks < rest)
        .total;
  };
  while (shared_chunks > 0 && bytes() > static_cast<int64_t>(limits.shared_per_block)) shared_chunks--;
  if (bytes() > static_cast<int64_t>(limits.shared_per_block)) return 0;
  const Launch shape{dim3(plan.cluster), dim3(kClusterThreads), nullptr, static_cast<size_t>(bytes()), plan.cluster};
  // a block has the registers of a multiprocessor to itself
  const int clusters =
      std::min(max_active_clusters(cluster_scan_kernel<Traits>, shape), limits.multiprocessors / plan.cluster);
  if (!clusters) return 0;
  const int64_t used = divide_up(a.sequences, Traits::kSequences), words = plan.cluster * Traits::kChunkWords;
  plan.group = Traits::kSequences, plan.precision = Traits::kPrecision;
  plan.shared_chunks = shared_chunks, plan.shared_bytes = bytes();
  plan.blocks = static_cast<int>(used * plan.cluster);
  plan.norm_columns = plan.blocks * Traits::kSets * kClusterWarps;
  plan.sums_rows = static_cast<int>(used * Traits::kSequences);
  plan.packed1 = words * plan.chunks1, plan.packed2 = words * plan.chunks2;
  return clusters;
}

template <bool kFactored>
bool plan_cluster(const ScanArgs& a, bool backward, const ScanOverrides& overrides, const DeviceLimits& limits,
                  ScanPlan& plan) {
  if (limits.major < 9) return false;
  const int quads = static_cast<int>(divide_up(a.N, 4));
  // The fewest blocks whose warps can hold the rows: blocks of a cluster communicate in every step.
  int size = overrides.cluster;
  for (int s = 2; !size && s <= 16; s *= 2)
    if (quads <= kClusterRows / 4 * s) size = s;
  if (!size || quads < size || quads > kClusterRows / 4 * size) return false;
  plan.path = static_cast<int>(ScanPath::kCluster);
  plan.cluster = size;
  plan.chunks1 = static_cast<int>(divide_up(a.N, kChunk));
  plan.chunks2 = kFactored ? static_cast<int>(divide_up(a.K, kChunk)) : 0;
  double clocks = 0;
  int clusters = 0;  // that the device holds at one time
  auto fit = [&](int group, int precision, ScanPlan& filled) {
    with_cluster_traits<kFactored>(backward, group, precision, a, [&](auto traits) {
      using Traits = decltype(traits);
      clusters = fit_cluster<Traits>(a, overrides, limits, filled);
      if (clusters) clocks = cluster_clocks<Traits>(filled, clusters, a.sequences);
    });
    return clusters > 0;
  };
  // The fewest sequences with which all clusters run at one time.
  for (int group : {1, 2, 4, 8}) {
    if (overrides.group && group != overrides.group) continue;
    if (!fit(group, kIeee, plan) || divide_up(a.sequences, group) <= clusters) break;
  }
  if (a.precision != kIeee && overrides.tensor != 0 && (!overrides.group || overrides.group == 8)) {
    ScanPlan other = plan;
    const double on_fma_units = plan.group ? clocks : INFINITY;
    if (fit(8, a.precision, other) && (overrides.tensor > 0 || clocks < on_fma_units)) plan = other;
    else clocks = on_fma_units;
  }
  const bool library = overrides.path < 0 && library_clocks<kFactored>(a, limits) < clocks;
  return plan.group > 0 && !library;
}

template <bool kFactored>
ScanPlan plan_scan(const ScanArgs& a, bool backward, const ScanOverrides& overrides) {
  const DeviceGuard guard(a.device);
  DeviceLimits limits = device_limits();
  auto allowed = [&](ScanPath path) { return overrides.path < 0 || overrides.path == static_cast<int>(path); };
  ScanPlan plan{};
  if constexpr (kFactored)
    if (allowed(ScanPath::kLowRank) && plan_low_rank(a, backward, overrides, limits, plan)) return plan;
  plan = {};
  if (allowed(ScanPath::kResident) && plan_resident<kFactored>(a, backward, overrides, limits, plan)) return plan;
  // Code for older GPUs has no clusters. All kernels of a build are compiled for the same ones, so one check suffices.
  if (limits.major >= 9 && compiled_for(scan_step_kernel<false>) < 90) limits.major = 8;
  plan = {};
  if (allowed(ScanPath::kCluster) && plan_cluster<kFactored>(a, backward, overrides, limits, plan)) return plan;
  plan = {};
  if (!allowed(ScanPath::kLibrary)) throw Error("the path that was asked for does not serve this size on this device");
  plan.path = static_cast<int>(ScanPath::kLibrary);
  plan.precision = a.precision;
  plan.blocks = plan.norm_columns = scan_step_blocks(a.sequences, a.N);
  plan.sums_rows = static_cast<int>(a.sequences);
  return plan;
}

// Packs the maps for the blocks of a cluster and launches their kernel.
template <class Traits>
void run_cluster(const ScanArgs& a, const ScanPlan& plan, cudaStream_t stream) {
  const int N = static_cast<int>(a.N), K = static_cast<int>(a.K);
  auto pack = [&](const MapSource& map, int shared_rows, int chunks, float* packed) {
    const int64_t words = static_cast<int64_t>(plan.cluster) * chunks * Traits::kChunkWords;
    launch(pack_chunks_kernel<Traits>, {dim3(static_cast<unsigned>(divide_up(words, 256))), dim3(256), stream}, map,
           shared_rows, chunks, plan.cluster, packed);
  };
  if (!a.packed && Traits::kFactored) {
    pack({a.first, 1, a.K, K, N}, first_product_rows(K, plan.cluster), plan.chunks1, a.packed1);
    pack({a.second, a.K, 1, N, K}, N, plan.chunks2, a.packed2);
  } else if (!a.packed) {
    pack({a.second, Traits::kBackward ? 1 : a.N, Traits::kBackward ? a.N : 1, N, N}, N, plan.chunks1, a.packed1);
  }
  const Launch at{dim3(static_cast<unsigned>(plan.blocks)), dim3(kClusterThreads), stream,
                  static_cast<size_t>(plan.shared_bytes), plan.cluster};
  launch(cluster_scan_kernel<Traits>, at, a, plan);
}

template <bool kFactored>
void run_scan(ScanArgs a, bool backward, const ScanPlan& plan, void* stream_address) {
  if (kFactored && backward) std::swap(a.first, a.second);  // W^T = first diag(scale) second^T
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_address);
  if (!a.T || !a.sequences) return;
  const DeviceGuard guard(a.device);
  if (plan.path == static_cast<int>(ScanPath::kLowRank)) {
    if constexpr (kFactored)
      with_low_rank_kernel(backward, a, [&](auto traits) {
        using Traits = decltype(traits);
        const unsigned threads = static_cast<unsigned>(32 * low_rank_warps<Traits>(a.N));
        const Launch at{dim3(static_cast<unsigned>(plan.blocks)), dim3(threads), stream,
                        static_cast<size_t>(plan.shared_bytes)};
        launch(low_rank_scan_kernel<Traits>, at, a);
      });
  } else if (plan.path == static_cast<int>(ScanPath::kResident)) {
    with_resident_kernel<kFactored>(backward, resident_columns<kFactored>(a), plan.group, a, [&](auto traits) {
      using Traits = decltype(traits);
      const Launch at{dim3(static_cast<unsigned>(plan.blocks)), dim3(Traits::kThreads), stream,
                      static_cast<size_t>(plan.shared_bytes)};
      launch(resident_scan_kernel<Traits>, at, a, plan.group);
    });
  } else {
    with_cluster_traits<kFactored>(backward, plan.group, plan.precision, a,
                                   [&](auto traits) { run_cluster<decltype(traits)>(a, plan, stream); });
  }
}

}  // namespace orthokern::cuda
