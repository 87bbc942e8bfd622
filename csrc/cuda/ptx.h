// Wrappers of PTX instructions without a CUDA C++ function. This is the only file with inline assembly.
//
// Under the host harness the same functions come from tests/cuda_host/ptx_host.h. Their semantics, in short:
//   cp_async*          a copy from global to shared memory. It is complete after cp_async_wait of its group; other
//                      threads also need a barrier
//   mbarrier_*         a barrier object in shared memory that counts arrivals and, from sm_90 on, bytes
//   cluster_*          blocks of a cluster; a ClusterAddress is an address in the shared memory of one of them
//   st_async           an asynchronous store, which subtracts its bytes from an mbarrier of the target block
//   mma_*              tensor core products of a warp
#pragma once

#include "cuda/launch.h"

namespace orthokern::cuda {

using Mbarrier = uint64_t;  // in shared memory, 8-byte aligned

#ifdef ORTHOKERN_CUDA_HOST
using ClusterAddress = uintptr_t;
#else
using ClusterAddress = uint32_t;  // in the window shared::cluster
#endif

}  // namespace orthokern::cuda

#ifdef ORTHOKERN_CUDA_HOST
#include "ptx_host.h"  // tests/cuda_host
#else

namespace orthokern::cuda {

#define ORTHOKERN_DEVICE __device__ __forceinline__
// Instructions of sm_90 and up. Compiled for an older GPU, the functions trap, and the kernels that use them are
// launched neither on that GPU nor on a later one that runs such code (plan_scan).
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define ORTHOKERN_SM90(...) __VA_ARGS__
#else
#define ORTHOKERN_SM90(...) __trap()
#endif

// The smaller and the larger of two numbers, NaN if one of them is NaN; fminf and fmaxf return the other one.
ORTHOKERN_DEVICE float minimum(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
ORTHOKERN_DEVICE float maximum(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

ORTHOKERN_DEVICE uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// ----------------------------------------------------------------------------------------- asynchronous copies, sm_80

// `bytes` is 4, 8 or 16, and both addresses are aligned to it.
template <int bytes>
ORTHOKERN_DEVICE void cp_async(void* shared, const void* global) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16, "cp.async moves 4, 8 or 16 bytes");
  if constexpr (bytes == 16)  // bypasses L1, which only .cg can do
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(shared)), "l"(global), "n"(bytes)
                 : "memory");
}
// The same with a predicate instead of a branch, because the compiler waits for pending loads at a branch.
template <int bytes>
ORTHOKERN_DEVICE void cp_async_if(bool condition, void* shared, const void* global) {
  static_assert(bytes == 4 || bytes == 8, "cp.async.ca moves 4 or 8 bytes");
  asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %3, 0;\n@p cp.async.ca.shared.global [%0], [%1], %2;\n}" ::"r"(
                   shared_address(shared)),
               "l"(global), "n"(bytes), "r"(static_cast<int>(condition))
               : "memory");
}
ORTHOKERN_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait until at most the `groups` newest groups of the thread are pending.
template <int groups>
ORTHOKERN_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
}

// Fetch the line of an address of global memory to the L2 cache.
ORTHOKERN_DEVICE void prefetch(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }

// ----------------------------------------------------------------------------------------------------------- mbarriers

ORTHOKERN_DEVICE void mbarrier_init(Mbarrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// Call it after the initialisations, before the barrier of the block or cluster that makes them visible to others.
ORTHOKERN_DEVICE void mbarrier_init_fence() {
  ORTHOKERN_SM90(asm volatile("fence.mbarrier_init.release.cluster;" :: : "memory"));
}
// Arrive, and add `bytes` of asynchronous stores and copies that the phase waits for.
ORTHOKERN_DEVICE void mbarrier_arrive_expect(Mbarrier* barrier, int bytes) {
  ORTHOKERN_SM90(
      asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n}" ::"r"(
                       shared_address(barrier)),
                   "r"(bytes) : "memory"));
}
// Wait for the end of the phase with this parity: 0, 1, 0, ... from the initialisation on. It acquires what arrived in
// shared memory of this block; at the scope of the cluster it would also empty the first-level cache.
ORTHOKERN_DEVICE void mbarrier_wait(Mbarrier* barrier, int parity) {
  ORTHOKERN_SM90(
      asm volatile("{\n.reg .pred done;\n"
                   "wait_%=:\n"
                   "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                   "@!done bra wait_%=;\n}" ::"r"(shared_address(barrier)),
                   "r"(parity) : "memory"));
}

// ----------------------------------------------------------------------------------------------------- clusters, sm_90

ORTHOKERN_DEVICE int cluster_rank() {
  uint32_t rank = 0;
  ORTHOKERN_SM90(asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank)));
  return static_cast<int>(rank);
}
// All threads of all blocks arrive (release) and wait (acquire).
ORTHOKERN_DEVICE void cluster_sync() {
  ORTHOKERN_SM90(asm volatile("barrier.cluster.arrive.release;" :: : "memory"));
  ORTHOKERN_SM90(asm volatile("barrier.cluster.wait.acquire;" :: : "memory"));
}
// The address that corresponds to `own` in the shared memory of the block with this rank.
ORTHOKERN_DEVICE ClusterAddress cluster_address(const void* own, int rank) {
  ClusterAddress address = 0;
  ORTHOKERN_SM90(asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(own)), "r"(rank)));
  return address;
}
// Store to shared memory of a block of the cluster. It subtracts its bytes from an mbarrier of the same block; the
// store is visible to threads that have waited for the mbarrier.
ORTHOKERN_DEVICE void st_async(ClusterAddress to, float4 value, ClusterAddress barrier) {
  ORTHOKERN_SM90(asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier) : "memory"));
}
// ------------------------------------------------------------------------------------------------- tensor cores, sm_80

// float to tf32, to nearest; the tensor cores would truncate the low 13 bits.
ORTHOKERN_DEVICE uint32_t to_tf32(float x) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}
// Two floats to bfloat16, to nearest even; `low` in the low half.
ORTHOKERN_DEVICE uint32_t to_bf16x2(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
// c [16, 8] += a [16, 8] b [8, 8]. Lane l has, with g = l / 4 and t = l % 4:
//   a: (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4)   b: (t, g), (t + 4, g)   c: (g, 2t), (g, 2t + 1), (g + 8, 2t),
//   (g + 8, 2t + 1)
ORTHOKERN_DEVICE void mma_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// c [16, 8] += a [16, 16] b [16, 8], pairs along the sum in a register. Lane l has:
//   a: (g, 2t..), (g + 8, 2t..), (g, 2t + 8..), (g + 8, 2t + 8..)   b: (2t.., g), (2t + 8.., g)   c: as above
ORTHOKERN_DEVICE void mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace orthokern::cuda
#endif
