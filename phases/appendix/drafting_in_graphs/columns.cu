// Up to eight tokens times a matrix in bfloat16, with a norm before, a gate behind, or a residual added; or with attention's
// splits in place of the input, which are combined on the way.
//
// A tensor core multiplies 16 rows by eight columns. A lone token is one of these columns, and the others are idle: so here
// they are the other tokens. Warps share out the inputs: each has all rows of its program and EACH inputs.
//
// Defined by the caller: K (inputs), EACH (of a warp), N (outputs), TILES (of 16 rows in a program), GATED (there are two
// matrices, and the outputs of the first, through SiLU, multiply those of the second), NORM, ONE_PLUS (its weights are
// distances from 1), ADD (a residual), TRIGGER_EARLY (the next kernel may start at once: it reads nothing but weights before its own
// wait), and SPLITS: 0, or at most so many, and then of heads of D numbers, H of them, CAPACITY tokens in each, BLOCK keys a
// tile, WINDOW.
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;
#define INLINE __device__ __forceinline__

// Numbers: bfloat16 comes in pairs, two in a word.
INLINE float low(u32 w) { return __uint_as_float(w << 16); }
INLINE float high(u32 w) { return __uint_as_float(w & 0xffff0000u); }
INLINE float wide(u16 v) { return __uint_as_float((u32)v << 16); }
INLINE u32 pack(float a, float b) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
  return r;
}

// Dependent launch: a kernel may start while the one before it runs, and waits until that one is complete.
INLINE void wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
INLINE void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// What another kernel has just written: one or eight numbers of bfloat16, or one of float32.
INLINE u16 load_one(const u16* p) {
  u16 r;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(r) : "l"(p) : "memory");
  return r;
}
INLINE uint4 load_eight(const u16* p) {
  uint4 r;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p) : "memory");
  return r;
}
INLINE float load_float(const float* p) {
  float r;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(r) : "l"(p) : "memory");
  return r;
}

// Tensor cores: 16 rows times eight columns. Of a lane, rows lane / 4 (a0, a2) and eight further down (a1, a3).
INLINE void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

constexpr int WARPS = K / EACH, THREADS = WARPS * 32;
constexpr int SPANS = EACH / 32;  // 32 of them lie in four lanes, 16 bytes of each row in one
constexpr int COLUMNS = 8;        // of a tensor core
constexpr int ROWS = TILES * 16 / (GATED ? 2 : 1), OUTS = (ROWS * COLUMNS + THREADS - 1) / THREADS;
constexpr int STRIDE = TILES * 16 + 4;  // so that no two lanes write to the same bank
static_assert(K % EACH == 0 && EACH % 32 == 0 && (!GATED || TILES % 2 == 0), "shape");
#if SPLITS
static_assert(D % EACH == 0 && SPLITS <= 8, "a warp's inputs are of one head");
#endif

// A lane's eight inputs of each span, all of them of token lane / 4.
struct Inputs {
  uint4 v[SPANS];

  INLINE void load(const u16* x) {
#pragma unroll
    for (int i = 0; i < SPANS; i++) v[i] = load_eight(x + i * 32);
  }

  INLINE float squares() const {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < SPANS; i++)
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const u32 w = (&v[i].x)[k];
        sum += low(w) * low(w) + high(w) * high(w);
      }
    return sum;
  }

  INLINE void norm(float scale, const uint4 (&gains)[SPANS]) {  // rounded as a norm apart
#pragma unroll
    for (int i = 0; i < SPANS; i++)
#pragma unroll
      for (int k = 0; k < 4; k++) {
        u32& w = (&v[i].x)[k];
        const u32 gain = (&gains[i].x)[k];
        w = pack(low(w) * scale * (low(gain) + ONE_PLUS), high(w) * scale * (high(gain) + ONE_PLUS));
      }
  }
};

#if SPLITS
// Attention's output of a token, from what its splits have left: `partial [split][token][head][D]`, and the logarithms of
// their weights, `lse [split][token][head]`.
INLINE void combine(Inputs& in, const u16* partial, const float* lse, int used, bool real, int token, int head, int at, int t) {
  float logs[2], weights[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {  // a lane weighs splits t and t + 4
    const int split = t + i * 4;
    const float log = load_float(lse + (min(split, used - 1) * CAPACITY + token) * H + head);
    logs[i] = split < used ? log : -1.0e30f;
  }
  constexpr int CHUNK = SPLITS < 4 ? SPLITS : 4;
  uint4 parts[CHUNK][SPANS];
  float sums[SPANS][8] = {};
#pragma unroll
  for (int from = 0; from < SPLITS; from += CHUNK) {
    if (from >= used) break;
#pragma unroll
    for (int s = 0; s < CHUNK; s++)
#pragma unroll
      for (int i = 0; i < SPANS; i++)
        parts[s][i] = load_eight(partial + ((i64)min(from + s, used - 1) * CAPACITY + token) * K + at + i * 32);
    if (from == 0) {
      float top = fmaxf(logs[0], logs[1]);
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      float total = 0.f;
#pragma unroll
      for (int i = 0; i < 2; i++) total += weights[i] = exp2f(logs[i] - top);
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
#pragma unroll
      for (int i = 0; i < 2; i++) weights[i] = __fdividef(weights[i], total);
    }
#pragma unroll
    for (int s = 0; s < CHUNK; s++) {
      const float weight = __shfl_sync(~0u, weights[(from + s) / 4], (from + s) % 4, 4);
#pragma unroll
      for (int i = 0; i < SPANS; i++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
          const u32 w = (&parts[s][i].x)[k];
          sums[i][2 * k] += weight * low(w);
          sums[i][2 * k + 1] += weight * high(w);
        }
    }
  }
#pragma unroll
  for (int i = 0; i < SPANS; i++)
#pragma unroll
    for (int k = 0; k < 4; k++) (&in.v[i].x)[k] = real ? pack(sums[i][2 * k], sums[i][2 * k + 1]) : 0;
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)  // one is enough: registers are for loads on their way
columns(u16* out, const u16* x, const u16* weight, const u16* norm_weight, const u16* residual, const float* lse,
    const int* context_len, const int* query_starts, float eps, i64 tokens) {
  __shared__ float sums[WARPS][COLUMNS][STRIDE];
  __shared__ float squares[WARPS][COLUMNS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first = blockIdx.x * ROWS, at = warp * EACH + t * 8;

  // Everything that does not depend on the tokens.
  uint4 weights[TILES][2][SPANS];
#pragma unroll
  for (int i = 0; i < TILES; i++)
#pragma unroll
    for (int side = 0; side < 2; side++) {
      const int up = GATED && i >= TILES / 2, row = first + (i - up * (TILES / 2)) * 16 + side * 8 + g;
#pragma unroll
      for (int span = 0; span < SPANS; span++)
        weights[i][side][span] = __ldg((const uint4*)(weight + (i64)(min(row, N - 1) + up * N) * K + at + span * 32));
    }
  uint4 gains[SPANS];
#pragma unroll
  for (int i = 0; i < SPANS; i++)
    gains[i] = NORM ? __ldg((const uint4*)(norm_weight + at + i * 32)) : make_uint4(0, 0, 0, 0);
#if SPLITS
  const int count = __ldg(query_starts + 1) - __ldg(query_starts), cached = max(__ldg(context_len) - count, 0);
  const int begin = WINDOW > 0 ? max(cached - WINDOW + 1, 0) / BLOCK * BLOCK : 0;
  const int tiles = max((cached - begin + BLOCK - 1) / BLOCK, 1), each = (tiles + SPLITS - 1) / SPLITS;
  const int used = (tiles + each - 1) / each;
#endif
  if (TRIGGER_EARLY) let_next_start();
  wait();
  if (!TRIGGER_EARLY) let_next_start();

  float added[OUTS];
  int where[OUTS];  // of the output; -1: there is none
#pragma unroll
  for (int i = 0; i < OUTS; i++) {
    const int o = threadIdx.x + i * THREADS, row = first + o % ROWS, token = o / ROWS;
    where[i] = o < ROWS * COLUMNS && row < N && token < tokens ? token * N + row : -1;
    added[i] = ADD && where[i] >= 0 ? wide(load_one(residual + where[i])) : 0.f;
  }
  Inputs in;
#if SPLITS
  combine(in, x, lse, used, g < count, g < count ? g : 0, warp * EACH / D, at, t);
#else
  in.load(x + (g < tokens ? g : 0) * K + at);  // columns without a token of their own are not written
#endif
  if (NORM) {
    float sum = in.squares();
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (t == 0) squares[warp][g] = sum;
    __syncthreads();
    sum = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += squares[i][g];
    in.norm(rsqrtf(sum / K + eps), gains);
  }

  // Which input is which column of a tile does not matter, as long as weights and inputs agree.
  float c[TILES][2][4] = {};
#pragma unroll
  for (int span = 0; span < SPANS; span++)
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      const uint4 a = weights[i][0][span], b = weights[i][1][span], v = in.v[span];
      mma_bf16(c[i][0], a.x, b.x, a.y, b.y, v.x, v.y);
      mma_bf16(c[i][1], a.z, b.z, a.w, b.w, v.z, v.w);
    }
#pragma unroll
  for (int i = 0; i < TILES; i++)
#pragma unroll
    for (int k = 0; k < 4; k++) sums[warp][t * 2 + k % 2][i * 16 + k / 2 * 8 + g] = c[i][0][k] + c[i][1][k];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < OUTS; i++) {
    if (where[i] < 0) continue;
    const int o = threadIdx.x + i * THREADS, row = o % ROWS, token = o / ROWS;
    float result = 0.f, up = 0.f;
#pragma unroll
    for (int k = 0; k < WARPS; k++) {
      result += sums[k][token][row];
      if (GATED) up += sums[k][token][ROWS + row];
    }
    if (GATED) result = result / (1.f + __expf(-result)) * up;
    out[where[i]] = pack(result + added[i], 0.f);
  }
}
