// Kernels that test the harness itself: what it has to compute, and bugs that it has to catch. test_cuda_host.py says
// what it expects.
#include "cuda/launch.h"
#include "cuda/ptx.h"

using namespace orthokern::cuda;

namespace {

// What a variant leaves out or does wrong; 0 is the correct kernel.
enum Bug { kNone = 0, kNoBarrier, kOutside, kDiverge, kOtherBarrier, kExit, kNoWait, kTooEarly, kMisaligned };

// out[i] = in[size - 1 - i], through dynamic shared memory.
__global__ void reverse_kernel(const float* in, float* out, int size, int bug) {
  float* tile = dynamic_shared<float>();
  const int i = threadIdx.x;
  tile[bug == kOutside && i == size - 1 ? size : i] = in[i];
  if (bug == kMisaligned && i == 3) out[i] = reinterpret_cast<const float2*>(in + i)->x;
  if (bug == kExit && i == 3) return;
  if (bug == kDiverge && i == 3) {
  } else if (bug == kOtherBarrier && i == 3) {
    __syncthreads();
  } else if (bug != kNoBarrier) {
    __syncthreads();
  }
  out[i] = tile[size - 1 - i];
}

// out[i] = sum of in up to i: steps that read and write the same static shared array. kNoBarrier leaves out the one
// before the write.
__global__ void prefix_kernel(const float* in, float* out, int size, int bug) {
  ORTHOKERN_SHARED(float, sums, [256]);
  const int i = threadIdx.x;
  sums[i] = in[i];
  if (bug == kOutside && i == 0) sums[256 + i] = 1;
  __syncthreads();
  for (int step = 1; step < size; step *= 2) {
    const float other = i >= step ? sums[i - step] : 0;
    if (bug != kNoBarrier) __syncthreads();
    sums[i] += other;
    __syncthreads();
  }
  out[i] = sums[i];
}

// out[i] = the sum of in over the half of the warp that i is in. kDiverge: the other half waits elsewhere.
__global__ void warp_kernel(const float* in, float* out, int, int bug) {
  const int lane = threadIdx.x;
  float sum = in[lane];
  if (lane < 16 || bug != kDiverge)
    for (int bits = 8; bits; bits /= 2) sum += __shfl_xor_sync(lane < 16 ? 0xffffu : 0xffff0000u, sum, bits);
  else __syncwarp();
  out[lane] = sum;
}

// out[i] = 2 in[i]: one warp copies tiles of 32 by cp.async, two groups ahead, for another one.
__global__ void pipeline_kernel(const float* in, float* out, int size, int bug) {
  float* ring = dynamic_shared<float>();  // [3][32]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tiles = size / 32;
  for (int t = 0; t < tiles + 2; t++) {
    if (warp == 0) {
      if (t < tiles) cp_async<4>(ring + t % 3 * 32 + lane, in + t * 32 + lane);
      cp_async_commit();
      if (bug != kNoWait) cp_async_wait<2>();
    }
    __syncthreads();
    if (warp == 1 && t >= 2) out[(t - 2) * 32 + lane] = 2 * ring[(t - 2) % 3 * 32 + lane];
    __syncthreads();  // the slot is free
  }
}

// A ring of blocks: block r of a cluster sends its 32 numbers to block r + 1, `size` / 32 blocks in all, clusters of 4.
__global__ void ring_kernel(const float* in, float* out, int, int bug) {
  float* mine = dynamic_shared<float>();  // [32] own, then [32] received
  float* received = mine + 32;
  ORTHOKERN_SHARED(Mbarrier, barrier, [1]);
  const int lane = threadIdx.x, next = (cluster_rank() + 1) % 4;
  mine[lane] = in[blockIdx.x * 32 + lane];
  if (lane == 0) {
    mbarrier_init(&barrier[0], 1);
    mbarrier_init_fence();
  }
  cluster_sync();
  if (bug == kExit && cluster_rank() == 1) return;
  if (lane == 0) mbarrier_arrive_expect(&barrier[0], 128);
  const ClusterAddress to = cluster_address(received, next), done = cluster_address(barrier, next);
  if (lane < 8) st_async(to + 16 * lane, *reinterpret_cast<float4*>(mine + 4 * lane), done);
  if (bug != kNoWait) mbarrier_wait(&barrier[0], bug == kTooEarly);
  out[blockIdx.x * 32 + lane] = received[lane];
  cluster_sync();  // nobody leaves while another block may still send
}

// in: a [16, 16], b [16, 8]; out [2, 16, 8]: the product in tf32 (two steps) and bfloat16.
__global__ void mma_kernel(const float* in, float* out) {
  float* tile = dynamic_shared<float>();  // a [16][16]
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  for (int i = lane; i < 256; i += 32) tile[i] = in[i];
  __syncwarp();
  const float *a = in, *b = in + 256;
  float c[4] = {0, 0, 0, 0}, d[4] = {0, 0, 0, 0};
  for (int k = 0; k < 16; k += 8) {
    uint32_t x[4];
    for (int i = 0; i < 4; i++) x[i] = to_tf32(tile[(g + 8 * (i % 2)) * 16 + k + t + 4 * (i / 2)]);
    mma_tf32(c, x, {to_tf32(b[(k + t) * 8 + g]), to_tf32(b[(k + t + 4) * 8 + g])});
  }
  auto pair = [&](int row, int k) { return to_bf16x2(a[row * 16 + k], a[row * 16 + k + 1]); };
  auto column = [&](int k) { return to_bf16x2(b[k * 8 + g], b[(k + 1) * 8 + g]); };
  mma_bf16(d, {pair(g, 2 * t), pair(g + 8, 2 * t), pair(g, 2 * t + 8), pair(g + 8, 2 * t + 8)},
           {column(2 * t), column(2 * t + 8)});
  for (int i = 0; i < 4; i++) {
    const int at = (g + 8 * (i / 2)) * 8 + 2 * t + i % 2;
    out[at] = c[i], out[128 + at] = d[i];
  }
}

}  // namespace

// in and out: addresses of float32 arrays, sizes as the kernels say.
void selftest(const std::string& name, uintptr_t in_address, uintptr_t out_address, int size, int variant) {
  const float* in = reinterpret_cast<const float*>(in_address);
  float* out = reinterpret_cast<float*>(out_address);
  const unsigned threads = static_cast<unsigned>(size);
  if (name == "reverse") launch(reverse_kernel, {dim3(1), dim3(threads), nullptr, threads * 4}, in, out, size, variant);
  else if (name == "prefix") launch(prefix_kernel, {dim3(1), dim3(threads), nullptr}, in, out, size, variant);
  else if (name == "warp") launch(warp_kernel, {dim3(1), dim3(32), nullptr}, in, out, size, variant);
  else if (name == "pipeline") launch(pipeline_kernel, {dim3(1), dim3(64), nullptr, 384}, in, out, size, variant);
  else if (name == "ring") launch(ring_kernel, {dim3(threads / 32), dim3(32), nullptr, 256, 4}, in, out, size, variant);
  else if (name == "mma") launch(mma_kernel, {dim3(1), dim3(32), nullptr, 1024}, in, out);
  else throw Error("no kernel " + name);
}
