// The activations on their own: y = phi(x), and the chain rule, on [rows, N].
//
//            columns, in vectors of 16 bytes ->
//        +-------------+-------------+
//   rows |  block 0,0  |  block 0,1  |    A block is blockDim.x vectors wide (a whole row where N is small enough: then
//           its threads read
//    |   |  block 1,0  |  block 1,1  |    consecutive memory whatever N is) and strides over the rows. A thread stays
//        in its columns, so
//    v   |  block 0,0  |  block 0,1  |    its slope or bias and the sums for their gradients live in registers.
//        +-------------+-------------+
//
// The gradient of the parameter: sums over the rows in a thread, then a tree over the block (over its rows, or all of
// it for a parameter of one element), one partial sum per block in `workspace`, and a second kernel over those. The
// order is fixed, so are the bits.
//
// Limit: memory bandwidth. Forward moves 2, backward 3 elements per element of x.
#include "cuda/activate.h"
#include "cuda/launch.h"
#include "cuda/ops.h"

namespace orthokern::cuda {
namespace {

constexpr int kThreads = 256;  // of a block, at most
constexpr int kBlocksPerProcessor = 4;

template <class T, int width>
struct alignas(sizeof(T) * width) Vector {
  T v[width];
};

// y = phi(x) of one vector; a pair never spans two.
template <class A, class T, int width>
__device__ __forceinline__ Vector<T, width> forward(const Vector<T, width>& x, const Vector<T, width>& param) {
  Vector<T, width> y;
#pragma unroll
  for (int i = 0; i < width; i++) y.v[i] = activate<A>(x.v[i], x.v[A::pairs ? i ^ 1 : i], i % 2 == 1, param.v[i]);
  return y;
}

// The gradient of x; adds the parameter's to `sums`.
template <class A, class T, int width>
__device__ __forceinline__ Vector<T, width> backward(const Vector<T, width>& g, const Vector<T, width>& x,
                                                     const Vector<T, width>& param, Vector<T, width>& sums) {
  const Vector<T, width> saved = A::needs_input ? x : forward<A>(x, param);
  Vector<T, width> out;
#pragma unroll
  for (int i = 0; i < width; i++) {
    const int other = A::pairs ? i ^ 1 : i;
    out.v[i] = activate_grad<A>(g.v[i], saved.v[i], g.v[other], saved.v[other], i % 2 == 1, param.v[i]);
    if constexpr (A::has_parameter) sums.v[i] += parameter_grad<A>(g.v[i], saved.v[i], param.v[i]);
  }
  return out;
}

template <class T, int width>
__device__ __forceinline__ Vector<T, width> load_param(const T* param, int64_t size, int64_t column) {
  Vector<T, width> p;
#pragma unroll
  for (int i = 0; i < width; i++) p.v[i] = param == nullptr ? T(0) : param[size == 1 ? 0 : column * width + i];
  return p;
}

template <class T, class A, int width>
__global__ void __launch_bounds__(kThreads)
    activation_fwd_kernel(const T* x, const T* param, int64_t param_size, T* y, int64_t rows, int64_t columns) {
  const int64_t column = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;  // in vectors, as `columns` is
  if (column >= columns) return;
  const Vector<T, width> p = load_param<T, width>(param, param_size, column);
  const auto* from = reinterpret_cast<const Vector<T, width>*>(x);
  auto* to = reinterpret_cast<Vector<T, width>*>(y);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.y;
#pragma unroll 2
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; row < rows; row += stride)
    to[row * columns + column] = forward<A>(from[row * columns + column], p);
}

// partial: [gridDim.x, N], or [gridDim.y * gridDim.x] for a parameter of one element; null if nobody asks for its
// gradient.
template <class T, class A, int width>
__global__ void __launch_bounds__(kThreads)
    activation_bwd_kernel(const T* grad_y, const T* x, const T* param, int64_t param_size, T* grad_x, T* partial,
                          int64_t rows, int64_t columns) {
  ORTHOKERN_SHARED(T, tree, [kThreads * width]);
  const int64_t column = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
  Vector<T, width> sums = {};
  if (column < columns) {
    const Vector<T, width> p = load_param<T, width>(param, param_size, column);
    const auto *g = reinterpret_cast<const Vector<T, width>*>(grad_y),
               *from = reinterpret_cast<const Vector<T, width>*>(x);
    auto* to = reinterpret_cast<Vector<T, width>*>(grad_x);
    const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.y;
#pragma unroll 2
    for (int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; row < rows; row += stride)
      to[row * columns + column] = backward<A>(g[row * columns + column], from[row * columns + column], p, sums);
  }
  if (partial == nullptr) return;

  // [items][lanes] -> [lanes]; a parameter of one element takes all of the block as items.
  const bool one = param_size == 1;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  if (one) {
    T sum = 0;
#pragma unroll
    for (int i = 0; i < width; i++) sum += sums.v[i];
    tree[thread] = sum;
  } else {
#pragma unroll
    for (int i = 0; i < width; i++) tree[thread * width + i] = sums.v[i];
  }
  const int lanes = one ? 1 : blockDim.x * width, mine = one ? 1 : width, first = one ? thread : thread * width;
  for (int items = one ? blockDim.x * blockDim.y : blockDim.y; items > 1; items = (items + 1) / 2) {
    const int half = (items + 1) / 2;
    __syncthreads();
    if (first + half * lanes < items * lanes)
      for (int i = 0; i < mine; i++) tree[first + i] += tree[first + half * lanes + i];
  }
  // what a thread writes here it has summed itself
  if (one) {
    if (thread == 0) partial[blockIdx.y * gridDim.x + blockIdx.x] = tree[0];
  } else if (threadIdx.y == 0 && column < columns) {
#pragma unroll
    for (int i = 0; i < width; i++) partial[(blockIdx.x * columns + column) * width + i] = tree[first + i];
  }
}

constexpr int kSumRows = 16;  // by 32 columns

// out [N]: the sums of the columns of partial [slices, N], in double.
template <class T>
__global__ void __launch_bounds__(32 * kSumRows)
    activation_sum_kernel(const T* partial, T* out, int64_t slices, int64_t N) {
  ORTHOKERN_SHARED(double, sums, [kSumRows][32]);
  const int64_t column = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x;
  double sum = 0;
  if (column < N)
    for (int64_t slice = threadIdx.y; slice < slices; slice += kSumRows)
      sum += static_cast<double>(partial[slice * N + column]);
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y || column >= N) return;
  for (int i = 1; i < kSumRows; i++) sum += sums[i][threadIdx.x];
  out[column] = static_cast<T>(sum);
}

// How the work is cut.
struct Shape {
  int width;        // elements of a vector
  int64_t columns;  // vectors of a row
  dim3 grid, block;
};
Shape shape_of(const ActivationArgs& args) {
  const int wide = args.dtype == kFloat64 ? 2 : 4;
  auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  const bool vectors =
      args.N % wide == 0 && aligned(args.x) && aligned(args.y) && aligned(args.grad_y) && aligned(args.grad_x);
  Shape s;
  s.width = vectors ? wide : on_pairs(args.activation) ? 2 : 1;
  s.columns = args.N / s.width;
  const int64_t tiles = (s.columns + kThreads - 1) / kThreads, across = (s.columns + tiles - 1) / tiles;
  s.block = dim3(static_cast<unsigned>(across), static_cast<unsigned>(kThreads / across));
  const int64_t needed = (args.rows + s.block.y - 1) / s.block.y;
  const int64_t wanted = int64_t{device_limits().multiprocessors} * kBlocksPerProcessor / tiles;
  const int64_t slices = needed < wanted ? needed : wanted > 1 ? wanted : 1;
  s.grid = dim3(static_cast<unsigned>(slices), static_cast<unsigned>(tiles));
  if (tiles > 65535)
    throw Error("activations: N=" + std::to_string(args.N) + " is more than the cuda backend takes: use the reference");
  return s;
}

template <class T, class A, int width, bool backward>
void launch_width(const ActivationArgs& args, const Shape& s) {
  const T *x = static_cast<const T*>(args.x), *param = static_cast<const T*>(args.act_param);
  const cudaStream_t stream = static_cast<cudaStream_t>(args.stream);
  if constexpr (!backward) {
    launch(activation_fwd_kernel<T, A, width>, {s.grid, s.block, stream}, x, param, args.act_param_size,
           static_cast<T*>(args.y), args.rows, s.columns);
  } else {
    T* partial = args.grad_act_param ? static_cast<T*>(args.workspace) : nullptr;
    launch(activation_bwd_kernel<T, A, width>, {s.grid, s.block, stream}, static_cast<const T*>(args.grad_y), x, param,
           args.act_param_size, static_cast<T*>(args.grad_x), partial, args.rows, s.columns);
    if (!partial) return;
    const bool one = args.act_param_size == 1;
    const int64_t size = one ? 1 : args.N, slices = one ? int64_t{s.grid.x} * s.grid.y : s.grid.x;
    launch(activation_sum_kernel<T>, {dim3(static_cast<unsigned>((size + 31) / 32)), dim3(32, kSumRows), stream},
           partial, static_cast<T*>(args.grad_act_param), slices, size);
  }
}
template <class T, class A, bool backward>
void launch_activation(const ActivationArgs& args, const Shape& s) {
  constexpr int wide = 16 / sizeof(T), narrow = A::pairs ? 2 : 1;
  for (const void* p : {args.x, static_cast<const void*>(args.y), args.grad_y, static_cast<const void*>(args.grad_x)})
    if (reinterpret_cast<uintptr_t>(p) % (narrow * sizeof(T)))
      throw Error("activations: a tensor that is read in pairs is not aligned to them");
  if (s.width == wide) launch_width<T, A, wide, backward>(args, s);
  else launch_width<T, A, narrow, backward>(args, s);
}
template <class T, bool backward>
void launch_dtype(const ActivationArgs& args) {
  const DeviceGuard guard(args.device);
  if (args.rows <= 0 || args.N <= 0) {  // nothing to write but the parameter's gradient
    if (args.grad_act_param)
      fill_zero(args.grad_act_param, static_cast<size_t>(args.act_param_size) * sizeof(T),
                static_cast<cudaStream_t>(args.stream));
    return;
  }
  const Shape s = shape_of(args);
  if (!visit_activation(args.activation, [&](auto a) { launch_activation<T, decltype(a), backward>(args, s); }))
    throw Error("activations: unknown activation " + std::to_string(args.activation));
}

}  // namespace

void activation_fwd(const ActivationArgs& args) {
  args.dtype == kFloat64 ? launch_dtype<double, false>(args) : launch_dtype<float, false>(args);
}
void activation_bwd(const ActivationArgs& args) {
  args.dtype == kFloat64 ? launch_dtype<double, true>(args) : launch_dtype<float, true>(args);
}

int64_t activation_workspace(const ActivationArgs& args) {
  if (args.rows <= 0 || args.N <= 0) return 0;
  const DeviceGuard guard(args.device);
  const Shape s = shape_of(args);
  return (args.act_param_size == 1 ? int64_t{s.grid.x} * s.grid.y : s.grid.x * args.N) *
         (args.dtype == kFloat64 ? 8 : 4);
}

}  // namespace orthokern::cuda
