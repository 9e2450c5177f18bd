// A decode step as a list of operators: T requests of one token, each with a row of the workspace.
//
// An operator is a *stage* of small tasks: some rows of a weight, a head of a request, or a request. Threads claim
// tasks one by one; the thread that ends the last task of a stage opens the next. So a stage waits for tasks and
// never for threads: one whose processor a neighbour has taken costs what it would have done, not the step.

#include <bits/stdc++.h>
#include <immintrin.h>

typedef int64_t Int;
typedef __m512 V;  // 16 numbers

// Numbers in a register; rows of a tile, and of one with four bits; bytes that are fetched early; turns before a sleep.
const int WIDTH = 16, SIDE = 4, BLOCK = 64, AHEAD = 8192, SPINS = 400;

enum Code { FLOAT32, BFLOAT16, INT8, INT4, ADD, NORM, SILU, GELU, TURN, ATTEND };  // first: products with such weights

struct Operator {
  // x, y and added are columns of the workspace; inputs of a group have one scale; tasks are of a request or a product.
  Int code, x, y, added, outputs, inputs, group, tasks, heads, kv_heads, window, block_size, rope;
  const void *weight, *scale;  // scale: [N] of float32; with groups [K / group, N] pairs of bfloat16: it, and what 8 is
  const float *bias, *q_norm, *k_norm;
  void *keys, *values;  // [N, P, KH, D], in bfloat16 if results are
  double factor;  // eps, or what scores are multiplied by
};

static V load(const float *at) { return _mm512_loadu_ps(at); }
static V load(const uint16_t *at) { return (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(*(const __m256i_u *)at), 16); }
static V load(const int8_t *at) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(*(const __m128i_u *)at)); }

// Store a number, or its upper half, which is all of it when it is rounded.
template <class A> static void store(A *to, float x) { memcpy(to, (char *)(&x + 1) - sizeof(A), sizeof(A)); }

// SIDE rows of a weight, from row n on, times the inputs of C requests, with all sums in registers.
template <int C, class W>
static void tile(const Operator &o, Int n, float *row, Int width) {
  V acc[SIDE][C] = {};
  for (Int k = 0; k < o.inputs; k += WIDTH)
    for (int r = 0; r < SIDE; r++) {
      const W *at = (const W *)o.weight + (n + r) * o.inputs + k;
      V w = load(at);
      __builtin_prefetch((const char *)at + AHEAD);
      for (int c = 0; c < C; c++) acc[r][c] += w * load(row + c * width + o.x + k);
    }
  for (int r = 0; r < SIDE; r++)
    for (int c = 0; c < C; c++) row[c * width + o.y + n + r] = _mm512_reduce_add_ps(acc[r][c]);
}

// The same with BLOCK rows of four bits: [K, 32] bytes, as PyTorch has them; byte i holds rows i and i + 32.
template <int C>
static void nibbles(const Operator &o, Int n, float *row, Int width) {
  const V numbers = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
  V scale[SIDE], zero[SIDE], acc[SIDE][C] = {};
  for (Int k = 0; k < o.inputs; k++)
    for (int r = 0; r < SIDE; r++) {
      if ((k & (o.group - 1)) == 0) {
        __m512i pair = _mm512_loadu_si512((int32_t *)o.scale + k / o.group * o.outputs + n + r * WIDTH);
        scale[r] = (V)_mm512_slli_epi32(pair, 16), zero[r] = (V)(pair & _mm512_set1_epi32(0xffff0000));
      }
      const char *at = (const char *)o.weight + n * o.inputs / 2 + k * BLOCK / 2 + r % 2 * WIDTH;
      __m512i bytes = _mm512_srli_epi32(_mm512_cvtepu8_epi32(*(const __m128i_u *)at), r / 2 * 4);
      V w = _mm512_permutexvar_ps(bytes, numbers) * scale[r] + zero[r];  // by the lowest four bits
      __builtin_prefetch(at + AHEAD);
      for (int c = 0; c < C; c++) acc[r][c] += w * row[c * width + o.x + k];
    }
  for (int r = 0; r < SIDE; r++)
    for (int c = 0; c < C; c++) _mm512_storeu_ps(row + c * width + o.y + n + r * WIDTH, acc[r][c]);
}

typedef void (*Tile)(const Operator &, Int, float *, Int);
const Tile ONE[] = {tile<1, float>, tile<1, uint16_t>, tile<1, int8_t>, nibbles<1>};  // by code
const Tile SOME[] = {tile<SIDE, float>, tile<SIDE, uint16_t>, tile<SIDE, int8_t>, nibbles<SIDE>};

struct Step {
  const Operator *operators;
  float *workspace;  // [T, width]
  const Int *positions;
  const int32_t *tables;  // [T, columns]
  Int count, T, width, columns, half;  // half: results are rounded to bfloat16
  std::atomic<uint32_t> ticket{0}, done{0};  // stage << 16 | next task; tasks that are done

  float rounded(float x) const {  // to the nearest, ties to even
    uint32_t bits = std::bit_cast<uint32_t>(x);
    return half && x == x ? std::bit_cast<float>(bits + 0x7fff + (bits >> 16 & 1) & 0xffff0000) : x;
  }

  void norm(const float *x, const float *weight, Int n, double eps, float *y) const {
    V sum = {};
    for (Int i = 0; i < n; i += WIDTH) sum += load(x + i) * load(x + i);
    float factor = 1 / std::sqrt(_mm512_reduce_add_ps(sum) / n + float(eps));
    for (Int i = 0; i < n; i++) y[i] = rounded(x[i] * factor * weight[i]);
  }

  Int place(const Operator &o, Int t, Int token, Int head) const {  // of a head in the cache
    Int block = tables[t * columns + token / o.block_size];
    return ((block * o.block_size + token % o.block_size) * o.kv_heads + head) * o.inputs;
  }

  template <class A>
  void turn(const Operator &o, Int t, Int head) {  // normalize and rotate a query or a key; store key and value
    Int n = o.inputs, kv = head - o.heads, at = place(o, t, positions[t], std::max<Int>(kv, 0));
    float *row = workspace + t * width, *x = row + o.x + head * n, *rope = row + o.rope;
    if (const float *weight = kv < 0 ? o.q_norm : o.k_norm) norm(x, weight, n, o.factor, x);
    std::vector<float> in(x, x + n);
    for (Int i = 0; i < n; i++) {
      x[i] = rounded(in[i] * rope[i] + in[(i + n / 2) % n] * rope[n + i]);
      if (kv < 0) continue;
      store((A *)o.keys + at + i, x[i]);
      store((A *)o.values + at + i, x[o.kv_heads * n + i]);
    }
  }

  template <class A>
  void attend(const Operator &o, Int t, Int head) {
    Int n = o.inputs, kv = head * o.kv_heads / o.heads, end = positions[t] + 1, begin = std::max<Int>(0, end - o.window);
    float *q = workspace + t * width + o.x + head * n, *out = workspace + t * width + o.y + head * n;
    float most = -INFINITY, total = 0;
    std::fill(out, out + n, 0);
    for (Int i = begin; i < end; i++) {
      Int at = place(o, t, i, kv);
      V sum = {};
      for (Int j = 0; j < n; j += WIDTH) sum += load((A *)o.keys + at + j) * load(q + j);
      float score = _mm512_reduce_add_ps(sum) * float(o.factor), top = std::max(most, score);
      float keep = std::exp(most - top), weight = std::exp(score - top);
      total = total * keep + weight, most = top;
      for (Int j = 0; j < n; j += WIDTH)
        _mm512_storeu_ps(out + j, load(out + j) * keep + load((A *)o.values + at + j) * weight);
    }
    for (Int i = 0; i < n; i++) out[i] = rounded(out[i] / total);
  }

  void task(const Operator &o, Int i) {
    Int blocks = (o.outputs + BLOCK - 1) / BLOCK;  // none where it is no product
    Int first = blocks * i / o.tasks * BLOCK, end = std::min(blocks * (i + 1) / o.tasks * BLOCK, o.outputs);
    for (Int n = first; n < end; n += o.code == INT4 ? BLOCK : SIDE)
      for (Int t = 0; t < T; t += SIDE) (T == 1 ? ONE : SOME)[o.code](o, n, workspace + t * width, width);
    for (Int t = 0; t < T; t++)
      for (Int n = first; n < end; n++) {
        float &y = workspace[t * width + o.y + n];
        y = rounded(y * (o.code == INT8 ? ((float *)o.scale)[n] : 1) + (o.bias ? o.bias[n] : 0));
      }
    Int t = i / o.tasks, head = i % o.tasks;
    float *x = workspace + t * width + o.x, *y = workspace + t * width + o.y;
    for (Int j = 0; o.code == ADD && j < o.inputs; j++) x[j] = rounded(x[j] + workspace[t * width + o.added + j]);
    if (o.code == ADD || o.code == NORM) norm(x, (const float *)o.weight, o.inputs, o.factor, y);
    if (o.code == TURN) half ? turn<uint16_t>(o, t, head) : turn<float>(o, t, head);
    if (o.code == ATTEND) half ? attend<uint16_t>(o, t, head) : attend<float>(o, t, head);
    for (Int j = 0; (o.code == SILU || o.code == GELU) && j < o.inputs; j++) {
      float z = x[j], slope = o.code == SILU ? z : 1.5957691216f * (z + 0.044715f * z * z * z);
      y[j] = rounded(rounded(z / (1 + std::exp(-slope))) * x[o.inputs + j]);  // 1 + tanh(s / 2) = 2 / (1 + e^-s)
    }
  }

  void work() {  // each thread, until there is no stage left
    for (;;) {
      uint32_t mine = ticket.fetch_add(1), stage = mine >> 16, seen;
      if (stage == count) return;
      Int all = operators[stage].tasks * (operators[stage].code <= INT4 ? 1 : T);
      if ((mine & 0xffff) < all) {
        task(operators[stage], mine & 0xffff);
        if (done.fetch_add(1) + 1 < all) continue;
        done = 0, ticket = (stage + 1) << 16;
        ticket.notify_all();
      } else {
        for (int i = 0; (seen = ticket) >> 16 == stage && i < SPINS; i++) _mm_pause();
        if (seen >> 16 == stage) ticket.wait(seen);
      }
    }
  }
};

extern "C" void run(const Operator *operators, float *workspace, const Int *positions, const int32_t *tables, Int count,
                    Int T, Int width, Int columns, Int half, Int threads) {
  Step step{operators, workspace, positions, tables, count, T, width, columns, half};
#pragma omp parallel num_threads(int(threads))
  step.work();
}
