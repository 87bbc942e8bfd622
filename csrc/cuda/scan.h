// The arguments of the CUDA scans: plain addresses and sizes, no torch. float32, contiguous, row-major.
// B batch, T time, N hidden, K rank, D number of token ids.
//
// Forward and backward are one recurrence with different epilogues of a step. In step i of a sequence
//
//   forward    t = i          a = map(state) + x_t,   state = h_t = phi(a)                  map = U diag(s) V^T or W
//   backward   t = T - 1 - i  a = map(state) + g_t,   state = delta_t = phi'(.) * a         map = V diag(s) U^T or W^T
//
// The last state of the backward is delta_1: dL/dh_0 needs one more product. A caller passes the same map in both
// directions, W = second diag(scale) first^T or W = second; for the backward of a factored map, run_scan exchanges
// first and second.
//
// A sequence may be cut into `chunk` steps at a time: the T steps of the B rows are then Q = B * ceil(T / chunk)
// virtual sequences that run in parallel, q = c * B + b for row b from step c * chunk on, each from its own initial
// state. Without chunks, chunk = T and Q = B.
//
// With cut, the state after a step is replaced by restart before the next product: forward by the state of a new
// sequence, backward by zeros, since nothing is passed to the steps before. The results of the step are not changed.
// Only without chunks.
//
// With leak l, one number or one for each unit, and c, the value that a unit carries from step to step:
//
//   forward    state = h_t = (1 - l) c + l phi(a)          c = h_t, or with a cut that of restart
//   backward   a = map(state) + g_t + (1 - l) c            c = a, or with a cut zero
//              state = delta_t = phi'(.) l a, from gate = a_t for every activation
//
// Only without chunks.
//
// With lengths, a sequence has the steps before its length: the forward ends early, the backward begins late, and
// padding of the results is not written. The values of lengths are not checked on the host: a value below 0 is read as
// 0, and one above T as T.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "common/fields.h"

namespace orthokern::cuda {

enum class ScanPath {
  kResident = 0,  // one block owns sequences, the factors stay in its registers (scan_resident.h)
  kCluster = 1,   // a cluster of blocks owns sequences, the factors are spread over it (scan_cluster.h)
  kLibrary = 2,   // the caller multiplies with a library, and run_scan_step ends each step (scan_step.h)
  kLowRank = 3,   // factored, K small: one block owns a sequence, its lanes hold rows of the factors (scan_low_rank.h)
};

// The lowest precision that products of float32 may have; in the order of orthokern.functional.PRECISIONS. Those below
// IEEE use tensor cores, with sums in float32. A plan states the precision of its products, which is never lower than
// the requested one.
enum ScanPrecision {
  kIeee = 0,
  kTf32 = 1,
  kBfloat16 = 2,
};

// The execution plan of a scan, made by plan_scan from sizes and the device only.
struct ScanPlan {
  int path;
  int group;                 // sequences of a block or cluster
  int blocks;                // of the whole grid, for one launch
  int norm_columns;          // partial sums of squares per step in `norms`
  int sums_rows;             // rows of `sums`
  int cluster;               // blocks of a cluster
  int chunks1, chunks2;      // columns of the first and the second map, in units of 128
  int shared_chunks;         // number of chunks in shared memory, besides those in registers
  int precision;             // of the products, enum ScanPrecision
  int64_t packed1, packed2;  // words of 4 bytes of workspace for the packed maps
  int64_t shared_bytes;

  ORTHOKERN_FIELDS_OF(fields, path, group, blocks, norm_columns, sums_rows, cluster, chunks1, chunks2, shared_chunks,
                      precision, packed1, packed2, shared_bytes);
};

struct ScanArgs {
  int device;
  int64_t T, B, N, K, D;  // K = 0: a dense map
  int64_t chunk, sequences;
  int64_t time;   // the step of t = 0, for comparison with `lengths`: the tensors may be a window of the whole sequence
  float clip;     // backward: delta_t is clipped to [-clip, clip] before it is used; infinity: no clipping
  int precision;  // enum ScanPrecision
  int activation;        // a number of common/activations.h
  int packed;            // 1: an earlier launch with the same maps has filled packed1 and packed2
  int act_param_stride;  // 0: one parameter, 1: one for each unit
  int leak_stride;       // likewise

  const float* x;          // [T, B, N]: e forward, the gradient of hs backward; null with tokens
  const int64_t* tokens;   // [T, B] or null; an id outside [0, D) makes the sequence NaN
  const float* table;      // [D, N] or null: the input term of each token
  const float* gate;       // backward: [T, B, N], hs or pre, from which phi' is computed; null for identity
  const float* start;      // [Q, N] states before the first step, or null for zeros
  const float* first;      // [N, K], V; null for dense_scan
  const float* scale;      // [K], s; null for dense_scan
  const float* second;     // [N, K], U; W [N, N] for dense_scan
  const float* act_param;  // [1] or [N] or null
  const int64_t* lengths;  // [B], counted from the beginning of time, or null: T for all
  const uint8_t* cut;      // [T, B], 0 or 1, or null
  const float* restart;    // [B, N], or null: zeros
  const float* leak;       // [1] or [N] or null: 1

  float* out;  // [T, B, N] states, or null; padding is not written
  float* pre;  // [T, B, N] the a, or null; padding is not written; backward: only with a leak
  float* end;  // [Q, N] states after `chunk` steps, or null; zero for a sequence that ends before
  // backward: [2, sums_rows, N] running sums for the gradient of act_param and their rounding errors, or null; the
  // caller multiplies them by the leak
  float* sums;
  // backward: [T, norm_columns] partial sums of squares of a, or null; must be zero on entry, stays zero on padding
  float* norms;
  float* carried;  // backward with a leak: [B, N], c before the first step; it receives c after the last one
  float* packed1;  // workspace, see ScanPlan
  float* packed2;

  // the fields that plan_scan reads
  ORTHOKERN_FIELDS_OF(planned, device, T, B, N, K, chunk, sequences, precision, activation, act_param_stride,
                      leak_stride, tokens, cut, leak);
  template <class Visit>
  void fields(Visit& visit) {
    planned(visit);
    ORTHOKERN_FIELDS(visit, D, time, clip, packed, x, table, gate, start, first, scale, second, act_param, lengths,
                     restart, out, pre, end, sums, norms, carried, packed1, packed2);
  }
};

// Planner overrides; the defaults leave the choice to the planner. Tests use them to reach every path at small sizes.
struct ScanOverrides {
  int path = -1, cluster = 0, group = 0;
  int shared_chunks = -1;
  int tensor = -1;  // clusters: 1 tensor cores wherever a precision below IEEE is allowed, 0 never

  ORTHOKERN_FIELDS_OF(fields, path, cluster, group, shared_chunks, tensor);
};

// A kernel of one step with a library product. It reads the arguments of the scan from device memory, where a function
// store_* wrote them, so that one CUDA graph serves calls with tensors at other addresses.
struct StepArgs {
  int device, part;
  int64_t rows, N;       // sequences, hidden
  int64_t step;          // counted from `first` of Stored
  const void* stored;    // Stored<Args> of the scan
  const float* product;  // a row for each sequence
  float* passed;         // the input of the next product
  void* stream;

  ORTHOKERN_FIELDS_OF(fields, device, part, rows, N, step, stored, product, passed, stream);
};
constexpr size_t kStoredBytes = 512;  // allocated by the caller
template <class Args>
struct Stored {
  int64_t first;  // the step of step 0 of a window; the caller increments it
  Args args;
};

// The states at the borders of chunks, see scan_carry.h.
struct ScanCarryArgs {
  int device;
  int64_t count, B, N;
  const double* power;  // [N, N], power^T
  const float* ends;    // [count, B, N]
  float* starts;        // [count + 1, B, N]
  void* stream;

  ORTHOKERN_FIELDS_OF(fields, device, count, B, N, power, ends, starts, stream);
};

ScanPlan plan_factored_scan(const ScanArgs& args, bool backward, const ScanOverrides& overrides);
ScanPlan plan_dense_scan(const ScanArgs& args, bool backward, const ScanOverrides& overrides);
// `stream` is a cudaStream_t of args.device.
void run_factored_scan(const ScanArgs& args, bool backward, const ScanPlan& plan, void* stream);
void run_dense_scan(const ScanArgs& args, bool backward, const ScanPlan& plan, void* stream);
// ScanPath::kLibrary: `part` 0 is the end of a step forward, 1 backward, from the products [Q, N] of the map and the
// states that enter it. Sets `passed` [Q, N] to what the next product multiplies: float32, or bfloat16 if that is the
// precision of the products.
void store_scan(const ScanArgs& args, void* stored, void* stream);
void run_scan_step(const StepArgs& args);
void run_scan_carry(const ScanCarryArgs& args);

}  // namespace orthokern::cuda
