// A lone token from the residual stream to attention's output: norm, QKV projection in FP8, head norms, RoPE, KV
// store and attention in one kernel.
//
// A cluster of CTAS programs has one key/value head and its query heads. Each program computes some outputs of the
// projection, and tells them to all; each attends to some of the keys, and tells each one the slice that it puts together.
// They write into each other's shared memory, where a barrier counts the bytes that have come: no kernel ends and none
// begins in between.
//
// Defined by who compiles, beside what product.cuh needs: D (of a head), G (query heads of a key/value head), KH, P (tokens
// of a block), CTAS, HEAD_NORM and HEAD_ONE_PLUS (its weights are distances from 1), AHEAD (what is read before the wait
// is complete: see `starts_early`).
#include "product.cuh"

constexpr int ROWS = (G + 2) * D / CTAS;  // outputs of the projection that a program computes
constexpr int TILES = ROWS / 16;
constexpr int KEYS = 16;                  // that a warp takes at a time
constexpr int STRIDE = CTAS * WARPS * KEYS;
constexpr int HALF = D / 2;
constexpr int PAIRS = HALF / 32;          // rotated pairs of a lane
constexpr int SLICE = D / CTAS;           // numbers of each head that a program puts together
constexpr int PITCH = D + 8;              // of keys and values in shared memory: rows begin in different banks
constexpr int PARTS = WARPS + 1;          // of attention in a program: one a warp, and the newest token's
constexpr float NEVER = -1.0e30f;         // a score that counts for nothing
static_assert(ROWS % 16 == 0 && D % 64 == 0 && P % KEYS == 0 && G <= 8 && SLICE % 4 == 0, "shape");
static_assert(ROWS / 4 * CTAS <= THREADS, "a thread sends four outputs to one program");

struct Shared {
  alignas(16) u16 cached[2][WARPS][2][KEYS][PITCH];  // keys and values, bfloat16; the next while these are read
  Vector vector;
  alignas(16) u16 q[WARPS][G][D];                    // queries, bfloat16
  alignas(16) float sums[WARPS][ROWS];
  alignas(16) float qkv[(G + 2) * D];                // the head's projection: queries, key, value
  alignas(16) float out[PARTS][G][D];
  float2 weights[PARTS][G];                          // of each part: the largest score, the sum of exponentials
  alignas(16) float slices[CTAS][G][SLICE];          // the same of each program
  float2 slice_weights[CTAS][G];
  u64 projected, attended;                           // barriers
};
extern "C" __device__ u32 bytes_shared = sizeof(Shared);

INLINE u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// A barrier that opens when `bytes` have come, from whomever in the cluster.
INLINE void expect(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(address(barrier)) : "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(address(barrier)), "r"(bytes) : "memory");
}
INLINE void await(u64* barrier) {
  u32 open = 0;
  while (!open)
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;"
                 " selp.u32 %0, 1, 0, p;}" : "=r"(open) : "r"(address(barrier)) : "memory");
}
INLINE u32 in_program(const void* p, int program) {  // the same place in another program's shared memory
  u32 r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address(p)), "r"(program));
  return r;
}
INLINE void send(float* to, u64* barrier, int program, float4 v) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];"
               :: "r"(in_program(to, program)), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w),
                  "r"(in_program(barrier, program)) : "memory");
}
INLINE void send(float2* to, u64* barrier, int program, float2 v) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];"
               :: "r"(in_program(to, program)), "f"(v.x), "f"(v.y), "r"(in_program(barrier, program)) : "memory");
}

// The matrix's row that is a cluster's output `at`. The matrix has all queries, then all keys, then all values; the cluster
// has its queries, its key and its value.
INLINE int row_of(int at, int kv_head) {
  const int head = at / D;
  return head < G ? kv_head * G * D + at : (head * KH + kv_head) * D + at % D;
}

// 16 keys or values of the cache into shared memory: those before `known`, and zeros for the others.
INLINE void stage(u16 (*to)[PITCH], const u16* from, int first, int known, i64 slot_stride, int lane) {
#pragma unroll
  for (int i = lane; i < KEYS * D / 8; i += 32) {
    const int key = i / (D / 8), part = i % (D / 8);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(address(&to[key][part * 8])), "l"(from + key * slot_stride + part * 8),
                    "r"(first + key < known ? 16 : 0) : "memory");
  }
}

// What a lane needs to norm and rotate its PAIRS numbers of a head's first half and their partners.
struct Turn {
  float cosine[PAIRS], sine[PAIRS];
  u16 q_weight[2][PAIRS], k_weight[2][PAIRS];

  INLINE void load(const float* c, const float* s, const u16* q, const u16* k, int lane) {
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
      cosine[i] = __ldg(c + HALF + lane * PAIRS + i);
      sine[i] = __ldg(s + HALF + lane * PAIRS + i);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        q_weight[h][i] = HEAD_NORM ? __ldg(q + h * HALF + lane * PAIRS + i) : 0;
        k_weight[h][i] = HEAD_NORM ? __ldg(k + h * HALF + lane * PAIRS + i) : 0;
      }
    }
  }

  // The first N heads of the projection as attention wants them: queries, and behind them the key.
  template <int N> INLINE void heads(float (&x)[N][2][PAIRS], const float* qkv, float eps, int lane) const {
    float squares[N];
#pragma unroll
    for (int n = 0; n < N; n++) {
      squares[n] = 0.f;
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
          x[n][h][i] = qkv[n * D + h * HALF + lane * PAIRS + i];
          squares[n] += x[n][h][i] * x[n][h][i];
        }
    }
    if (HEAD_NORM) {
#pragma unroll
      for (int o = 16; o; o >>= 1)
#pragma unroll
        for (int n = 0; n < N; n++) squares[n] += __shfl_xor_sync(~0u, squares[n], o);
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
      const float norm = rsqrtf(squares[n] / D + eps);
#pragma unroll
      for (int i = 0; i < PAIRS; i++) {
        float a = x[n][0][i], b = x[n][1][i];
        if (HEAD_NORM) {
          a = as_bf16(a * norm * (wide((n < G ? q_weight : k_weight)[0][i]) + HEAD_ONE_PLUS));
          b = as_bf16(b * norm * (wide((n < G ? q_weight : k_weight)[1][i]) + HEAD_ONE_PLUS));
        }
        x[n][0][i] = as_bf16(a * cosine[i] - b * sine[i]);
        x[n][1][i] = as_bf16(b * cosine[i] + a * sine[i]);
      }
    }
  }
};

// Keys and values of a tile as the tensor cores want them. Which number of a head is which column does not matter, as
// long as both sides agree: a lane has eight of a key side by side. Of values it has eight of four tokens, and pairs what
// two tokens have.
struct Tile {
  uint4 k[2][D / 32];
  u32 v[D / 8][2];

  INLINE void load(u16 (*keys)[PITCH], u16 (*values)[PITCH], int g, int t) {
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int c = 0; c < D / 32; c++) k[n][c] = *(const uint4*)&keys[n * 8 + g][c * 32 + t * 8];
#pragma unroll
    for (int j = 0; j < D / 64; j++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const uint4 a = *(const uint4*)&values[h * 8 + t * 2][j * 64 + g * 8];
        const uint4 b = *(const uint4*)&values[h * 8 + t * 2 + 1][j * 64 + g * 8];
#pragma unroll
        for (int e = 0; e < 8; e++)
          v[j * 8 + e][h] = __byte_perm((&a.x)[e / 2], (&b.x)[e / 2], e % 2 ? 0x7632 : 0x5410);
      }
  }
};

// Attention's parts `[N]` of head `h` in one: their weights together, and the sum of four of their numbers from `d` on.
template <int N, int WIDTH>
INLINE float4 combine(float2& all, const float2 (&weights)[N][G], const float (&parts)[N][G][WIDTH], int h, int d) {
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  all = make_float2(NEVER, 0.f);
#pragma unroll
  for (int k = 0; k < N; k++) all.x = fmaxf(all.x, weights[k][h].x);
#pragma unroll
  for (int k = 0; k < N; k++) {
    const float2 weight = weights[k][h];
    const float4 v = *(const float4*)&parts[k][h][d];
    const float portion = exp2f(weight.x - all.x);
    const bool there = weight.y > 0.f;  // otherwise anything may lie there
    all.y += weight.y * portion;
    sum.x += there ? v.x * portion : 0.f;
    sum.y += there ? v.y * portion : 0.f;
    sum.z += there ? v.z * portion : 0.f;
    sum.w += there ? v.w * portion : 0.f;
  }
  return sum;
}

extern "C" __global__ void __cluster_dims__(CTAS, 1, 1) __launch_bounds__(THREADS)
attend(u16* out, const u16* x, const u16* norm_weight, const u8* weight, const float* weight_scale,
       const float* cosine, const float* sine, const u16* q_weight, const u16* k_weight, u16* k_cache, u16* v_cache,
       const int* block_table, i64 table_size, const int* context_len, const i64* slots, float eps, float head_eps,
       float factor, i64 block_stride, i64 slot_stride, i64 head_stride) {
  extern __shared__ __align__(16) u8 memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int rank = blockIdx.x % CTAS, kv_head = blockIdx.x / CTAS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  if (threadIdx.x == 0) {
    expect(&s.projected, (G + 2) * D * 4);
    expect(&s.attended, CTAS * G * (SLICE * 4 + 8));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");

  // Everything that does not depend on the token. First what addresses depend on: behind the weights it would come late.
  if (!AHEAD) wait();
  const int known = *(const volatile int*)context_len - 1;  // tokens in the cache
  const int start = (warp * CTAS + rank) * KEYS;            // this warp's first key; the next is STRIDE further on
  i64 blocks[2];
#pragma unroll
  for (int i = 0; i < 2; i++)
    blocks[i] = *(const volatile int*)(block_table + min((start + i * STRIDE) / P, (int)table_size - 1));
  const i64 slot = *(const volatile i64*)slots, at_head = kv_head * head_stride;
  const auto fetch = [&](int first, i64 block, int into) {
    const i64 at = block * block_stride + first % P * slot_stride + at_head;
    stage(s.cached[into][warp][0], k_cache + at, first, known, slot_stride, lane);
    stage(s.cached[into][warp][1], v_cache + at, first, known, slot_stride, lane);
  };
  uint4 weights[TILES][2][SPANS];
#pragma unroll
  for (int i = 0; i < TILES * 2; i++)
#pragma unroll
    for (int span = 0; span < SPANS; span++) {
      const int row = row_of(rank * ROWS + i * 8, kv_head) + g;
      weights[i / 2][i % 2][span] = load_weights(weight + (i64)row * K, warp, span, lane);
    }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int first = start + i * STRIDE;
    if (first < known) fetch(first, blocks[i], i);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  Input input;
  input.load_gains(norm_weight, warp, lane);
  const int quad = threadIdx.x % (ROWS / 4) * 4;  // of the outputs, the four that a thread sends
  const float4 row_scale = __ldg((const float4*)(weight_scale + row_of(rank * ROWS + quad, kv_head)));
  Turn turn;
  turn.load(cosine, sine, q_weight, k_weight, lane);
  for (int i = threadIdx.x; i < PARTS * G; i += THREADS) s.weights[i / G][i % G] = make_float2(NEVER, 0.f);
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // everybody's barriers are there
  if (AHEAD) wait();

  // The projection: a program's outputs, to all.
  input.load(x, warp, lane);
  let_next_start();
  const float scale = input.prepare(s.vector, eps, warp, lane);
  float sums[TILES][2];
  multiply<TILES, true>(sums, s.vector.x[warp], lane, [&](int i, int side, int span) { return weights[i][side][span]; });
  put_down(s.sums, sums, warp, lane);
  if (threadIdx.x < ROWS / 4 * CTAS) {
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int k = 0; k < WARPS; k++) {
      const float4 part = *(const float4*)&s.sums[k][quad];
      sum.x += part.x; sum.y += part.y; sum.z += part.z; sum.w += part.w;
    }
    sum.x = as_bf16(sum.x * scale * row_scale.x); sum.y = as_bf16(sum.y * scale * row_scale.y);
    sum.z = as_bf16(sum.z * scale * row_scale.z); sum.w = as_bf16(sum.w * scale * row_scale.w);
    send(&s.qkv[rank * ROWS + quad], &s.projected, threadIdx.x / (ROWS / 4), sum);
  }
  asm volatile("cp.async.wait_group 1;" ::: "memory");
  __syncwarp();
  Tile tile;
  if (start < known) tile.load(s.cached[0][warp][0], s.cached[0][warp][1], g, t);
  await(&s.projected);

  // The newest token, by a warp that has little to do: a part of attention by itself, with all of its weight.
  if (rank == CTAS - 1 && warp == WARPS - 1) {
    float h[G + 1][2][PAIRS], score[G];
    turn.heads(h, s.qkv, head_eps, lane);
#pragma unroll
    for (int n = 0; n < G; n++) {
      score[n] = 0.f;
#pragma unroll
      for (int i = 0; i < PAIRS; i++) score[n] += h[n][0][i] * h[G][0][i] + h[n][1][i] * h[G][1][i];
    }
#pragma unroll
    for (int o = 16; o; o >>= 1)
#pragma unroll
      for (int n = 0; n < G; n++) score[n] += __shfl_xor_sync(~0u, score[n], o);
    if (lane == 0) {
#pragma unroll
      for (int n = 0; n < G; n++) s.weights[WARPS][n] = make_float2(score[n] * factor, 1.f);
    }
    const i64 at = slot / P * block_stride + slot % P * slot_stride + at_head;
    for (int d = lane; d < D; d += 32) {
      const float value = s.qkv[(G + 1) * D + d];
#pragma unroll
      for (int n = 0; n < G; n++) s.out[WARPS][n][d] = value;
      if (slot >= 0) v_cache[at + d] = pack(value, 0.f);
    }
    if (slot >= 0) {
#pragma unroll
      for (int e = 0; e < 2; e++)
#pragma unroll
        for (int i = 0; i < PAIRS; i++) k_cache[at + e * HALF + lane * PAIRS + i] = pack(h[G][e][i], 0.f);
    }
  }

  // The cached ones: 16 a warp, and further on as far as there are.
  if (start < known) {
    float h[G][2][PAIRS];
    turn.heads(h, s.qkv, head_eps, lane);
#pragma unroll
    for (int n = 0; n < G; n++)
#pragma unroll
      for (int e = 0; e < 2; e++)
#pragma unroll
        for (int i = 0; i < PAIRS; i += 2) {
          u16* to = &s.q[warp][n][e * HALF + lane * PAIRS + i];
          if (PAIRS > 1) *(u32*)to = pack(h[n][e][i], h[n][e][PAIRS > 1 ? i + 1 : i]);
          else *to = pack(h[n][e][i], 0.f);
        }
    __syncwarp();
    uint4 q[D / 32];
#pragma unroll
    for (int c = 0; c < D / 32; c++)
      q[c] = g < G ? *(const uint4*)&s.q[warp][g][c * 32 + t * 8] : make_uint4(0, 0, 0, 0);
    float best = NEVER, total = 0.f, o[D / 8][4] = {};
    int now = 0;
    for (int first = start;;) {
      float score[2][2][4] = {};  // of 2 x 8 keys, in two halves, so that products wait less for each other
#pragma unroll
      for (int c = 0; c < D / 32; c++)
#pragma unroll
        for (int n = 0; n < 2; n++) {
          mma_bf16(score[n][0], q[c].x, 0, q[c].y, 0, tile.k[n][c].x, tile.k[n][c].y);
          mma_bf16(score[n][1], q[c].z, 0, q[c].w, 0, tile.k[n][c].z, tile.k[n][c].w);
        }
      float most = best, p[4], sum = 0.f;
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const bool there = first + e / 2 * 8 + t * 2 + e % 2 < known;
        p[e] = there ? (score[e / 2][0][e % 2] + score[e / 2][1][e % 2]) * factor : NEVER;
        most = fmaxf(most, p[e]);
      }
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      const float shrink = exp2f(best - most);
      best = most;
#pragma unroll
      for (int e = 0; e < 4; e++) { p[e] = exp2f(p[e] - most); sum += p[e]; }
      total = total * shrink + sum;
#pragma unroll
      for (int j = 0; j < D / 8; j++) {
        o[j][0] *= shrink; o[j][1] *= shrink;
        mma_bf16(o[j], pack(p[0], p[1]), 0, pack(p[2], p[3]), 0, tile.v[j][0], tile.v[j][1]);
      }
      const int later = first + 2 * STRIDE;
      first += STRIDE;
      if (first >= known) break;
      __syncwarp();
      if (later < known) fetch(later, block_table[later / P], now);
      asm volatile("cp.async.commit_group; cp.async.wait_group 1;" ::: "memory");
      __syncwarp();
      now ^= 1;
      tile.load(s.cached[now][warp][0], s.cached[now][warp][1], g, t);
    }
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    if (g < G) {
      if (t == 0) s.weights[warp][g] = make_float2(best, total);
#pragma unroll
      for (int j = 0; j < D / 8; j += 8)
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
          for (int e = 0; e < 8; e += 4)
            *(float4*)&s.out[warp][g][j * 8 + (t * 2 + n) * 8 + e] =
                make_float4(o[j + e][n], o[j + e + 1][n], o[j + e + 2][n], o[j + e + 3][n]);
    }
  }

  // Parts meet in their program, and slices of what they make in the one that is to put them together.
  __syncthreads();
  for (int i = threadIdx.x; i < G * D / 4; i += THREADS) {
    const int h = i / (D / 4), d = i % (D / 4) * 4;
    float2 all;
    const float4 sum = combine(all, s.weights, s.out, h, d);
    send(&s.slices[rank][h][d % SLICE], &s.attended, d / SLICE, sum);
    if (d % SLICE == 0) send(&s.slice_weights[rank][h], &s.attended, d / SLICE, all);
  }
  await(&s.attended);
  for (int i = threadIdx.x; i < G * SLICE / 4; i += THREADS) {
    const int h = i / (SLICE / 4), d = i % (SLICE / 4) * 4;
    float2 all;
    const float4 sum = combine(all, s.slice_weights, s.slices, h, d);
    u16* to = out + (kv_head * G + h) * D + rank * SLICE + d;
    *(u32*)to = pack(__fdividef(sum.x, all.y), __fdividef(sum.y, all.y));
    *(u32*)(to + 2) = pack(__fdividef(sum.z, all.y), __fdividef(sum.w, all.y));
  }
}
