// One token times a matrix in FP8, with a norm before, a gate behind, or a residual added.
//
// Defined by who compiles, beside what product.cuh needs: N (outputs), ROWS (outputs of a program, a multiple of 8), GATED
// (there are two matrices, and the outputs of the first, through SiLU, multiply those of the second), ADD (a residual),
// AHEAD (the next kernel may start at once: it reads nothing but weights before its own wait).
#include "product.cuh"

constexpr int TILES = GATED ? ROWS / 8 : (ROWS + 15) / 16;  // gated: the gate's rows above, the other matrix's below
constexpr bool LOWER = GATED || ROWS > 8;
static_assert(ROWS % 8 == 0 && (GATED || ROWS == 8 || ROWS % 16 == 0) && ROWS <= THREADS, "shape");

struct Shared {
  Vector vector;
  float sums[WARPS][TILES * 16];
};
extern "C" __device__ u32 bytes_shared = 0;  // beyond what it has anyway

extern "C" __global__ void __launch_bounds__(THREADS)
gemv(u16* out, const u16* x, const u8* weight, const float* weight_scale, const u16* norm_weight,
     const u16* residual, float eps) {
  __shared__ Shared s;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first = blockIdx.x * ROWS, row = first + threadIdx.x;
  const bool mine = threadIdx.x < ROWS && row < N;

  // Everything that does not depend on the token.
  uint4 weights[TILES][1 + LOWER][SPANS];
#pragma unroll
  for (int i = 0; i < TILES; i++)
#pragma unroll
    for (int side = 0; side < 1 + LOWER; side++) {
      const int at = min(first + (GATED ? i * 8 : i * 16 + side * 8) + lane / 4, N - 1) + (GATED ? side * N : 0);
#pragma unroll
      for (int span = 0; span < SPANS; span++)
        weights[i][side][span] = load_weights(weight + (i64)at * K, warp, span, lane);
    }
  Input input;
  input.load_gains(norm_weight, warp, lane);
  const float row_scale = mine ? __ldg(weight_scale + row) : 0.f;
  const float up_scale = GATED && mine ? __ldg(weight_scale + N + row) : 0.f;
  if (AHEAD) let_next_start();
  wait();
  if (!AHEAD) let_next_start();

  input.load(x, warp, lane);
  const float added = ADD && mine ? wide(load_one(residual + row)) : 0.f;
  const float scale = input.prepare(s.vector, eps, warp, lane);
  float sums[TILES][2];
  multiply<TILES, LOWER>(sums, s.vector.x[warp], lane, [&](int i, int side, int span) { return weights[i][side][span]; });
  put_down(s.sums, sums, warp, lane);
  if (mine) {
    const int at = GATED ? threadIdx.x / 8 * 16 + threadIdx.x % 8 : threadIdx.x;
    float result = 0.f, up = 0.f;
#pragma unroll
    for (int k = 0; k < WARPS; k++) {
      result += s.sums[k][at];
      if (GATED) up += s.sums[k][at + 8];
    }
    result *= scale * row_scale;
    if (GATED) result = result / (1.f + __expf(-result)) * (up * scale * up_scale);
    out[row] = pack(result + added, 0.f);
  }
}
