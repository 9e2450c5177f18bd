// What kernels for a lone token share: its input, normed and rounded, and products by tensor cores.
//
// Defined by who compiles: K (inputs), WARPS (of a program), NORM (there is one before the product), ONE_PLUS (its weights
// are distances from 1), ROUND (the input is rounded to FP8).
#include "basics.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int EACH = K / WARPS;   // inputs of a warp
constexpr int SPANS = EACH / 64;  // 64 of them lie in four lanes, 16 bytes of each row in one
static_assert(EACH % 64 == 0, "inputs must be a multiple of 64 for each warp");

INLINE u32 pack_half(float a, float b) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
  return r;
}
INLINE u16 pack_e4m3(float a, float b) {
  u16 r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(b), "f"(a));
  return r;
}
INLINE u32 halves(u16 two) {  // two numbers of e4m3 as float16, which holds them exactly
  u32 r;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(two));
  return r;
}

INLINE void mma_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

struct Vector {  // a prepared input, in shared memory
  alignas(16) u16 x[WARPS][EACH];  // float16
  float2 found[WARPS];             // in each warp's part: the sum of squares, and the largest magnitude
};

// A warp's part of the input: two numbers of each span in a lane.
struct Input {
  u32 gains[SPANS];
  float a[SPANS], b[SPANS];

  INLINE void load_gains(const u16* norm_weight, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < SPANS; i++)
      gains[i] = NORM ? __ldg((const u32*)(norm_weight + warp * EACH + i * 64 + lane * 2)) : 0;
  }

  INLINE void load(const u16* x, int warp, int lane) {
    u32 both[SPANS];
#pragma unroll
    for (int i = 0; i < SPANS; i++) both[i] = load_two(x + warp * EACH + i * 64 + lane * 2);
#pragma unroll
    for (int i = 0; i < SPANS; i++) { a[i] = low(both[i]); b[i] = high(both[i]); }
  }

  // Norm and round it, into shared memory; returns what the product is to be multiplied by.
  INLINE float prepare(Vector& s, float eps, int warp, int lane) {
    float squares = 0.f, top = 0.f;
#pragma unroll
    for (int i = 0; i < SPANS; i++) {
      if (NORM) {
        squares += a[i] * a[i] + b[i] * b[i];
        a[i] *= low(gains[i]) + ONE_PLUS;
        b[i] *= high(gains[i]) + ONE_PLUS;
      }
      top = fmaxf(top, fmaxf(fabsf(a[i]), fabsf(b[i])));
    }
    if (NORM) {
#pragma unroll
      for (int o = 16; o; o >>= 1) squares += __shfl_xor_sync(~0u, squares, o);
    }
    top = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(top)));  // their bits are in the same order
    if (lane == 0) s.found[warp] = make_float2(squares, top);
    __syncthreads();
    squares = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) { squares += s.found[i].x; top = fmaxf(top, s.found[i].y); }
    const float norm = NORM ? rsqrtf(squares / K + eps) : 1.f;
    top *= norm;
    float scale, inverse;
    if (ROUND) {
      scale = fmaxf(as_bf16(top) * (1.f / 448.f), 1.1754943508222875e-38f);
      inverse = __fdiv_rn(1.f, scale);
    } else {  // a power of two rounds nothing, and float16 holds what is left
      const u32 bits = __float_as_uint(fmaxf(top, 1.1754943508222875e-38f)) & 0x7f800000u;
      scale = __uint_as_float(bits);
      inverse = __uint_as_float((254u << 23) - bits);
    }
#pragma unroll
    for (int i = 0; i < SPANS; i++) {
      const float p = (NORM ? as_bf16(a[i] * norm) : a[i]) * inverse;  // rounded as a norm apart
      const float q = (NORM ? as_bf16(b[i] * norm) : b[i]) * inverse;
      *(u32*)&s.x[warp][i * 64 + lane * 2] = ROUND ? halves(pack_e4m3(p, q)) : pack_half(p, q);
    }
    __syncwarp();
    return scale;
  }
};

// 16 inputs of a row side by side, those of a warp and span that are a lane's.
INLINE uint4 load_weights(const u8* row, int warp, int span, int lane) {
  return __ldg((const uint4*)(row + warp * EACH + span * 64 + lane % 4 * 16));
}

// A warp's part of a product. Tiles have 16 rows, eight upper ones and perhaps eight lower ones; the vector is the first of
// the eight columns that a tensor core has. Which input is which column of a tile does not matter, as long as weights and
// vector agree: a lane has 16 inputs side by side. weights(tile, side, span): its 16 of row `lane / 4` of that side. The
// sums are of that row, in lanes that are a multiple of four.
template <int TILES, bool LOWER, typename Find>
INLINE void multiply(float (&sums)[TILES][2], const u16* x, int lane, const Find& weights) {
  float c[TILES][4] = {};
#pragma unroll
  for (int span = 0; span < SPANS; span++) {
    uint4 v[2] = {}, upper[TILES], lower[TILES] = {};
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      upper[i] = weights(i, 0, span);
      if (LOWER) lower[i] = weights(i, 1, span);
    }
    if (lane < 4) {
      v[0] = *(const uint4*)(x + span * 64 + lane * 16);
      v[1] = *(const uint4*)(x + span * 64 + lane * 16 + 8);
    }
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
      for (int i = 0; i < TILES; i++) {
        const u32 a = (&upper[i].x)[k], b = (&lower[i].x)[k];
        mma_f16(c[i], halves(a & 0xffff), LOWER ? halves(b & 0xffff) : 0, halves(a >> 16),
                LOWER ? halves(b >> 16) : 0, (&v[k / 2].x)[k % 2 * 2], (&v[k / 2].x)[k % 2 * 2 + 1]);
      }
  }
#pragma unroll
  for (int i = 0; i < TILES; i++) { sums[i][0] = c[i][0]; sums[i][1] = c[i][2]; }
}

// The sums of all warps' parts, one after the other in shared memory. All threads meet behind it.
template <int TILES> INLINE void put_down(float (&out)[WARPS][TILES * 16], const float (&sums)[TILES][2], int warp, int lane) {
  if (lane % 4 == 0) {
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      out[warp][i * 16 + lane / 4] = sums[i][0];
      out[warp][i * 16 + 8 + lane / 4] = sums[i][1];
    }
  }
  __syncthreads();
}
