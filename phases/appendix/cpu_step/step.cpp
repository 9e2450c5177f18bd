// A decode step as a list of operators: T requests of one token, each with a row of the workspace.
//
// An operator is a *stage* of small tasks: some rows of a weight, a head of a request, or a request. Threads claim
// tasks one by one; the thread that ends the last task of a stage opens the next. So a stage waits for tasks and
// never for threads: one whose processor a neighbour has taken costs what it would have done, not the step.

#include <bits/stdc++.h>
#include <immintrin.h>

typedef int64_t Int;
typedef __m512 V;  // 16 numbers

const int WIDTH = 16, SIDE = 4, ROWS = 32;  // numbers in a register; rows of a tile, and of a task
const int AHEAD = 8192, SPINS = 400;        // bytes that are fetched early; turns before a thread sleeps

enum Code { FLOAT32, BFLOAT16, INT8, NORM, ADD, SILU, GELU, TURN, ATTEND };  // first: products with such weights

struct Operator {
  Int code, x, y, outputs, inputs;  // x and y are columns of the workspace
  Int tasks, heads, kv_heads, window, block_size, rope;  // tasks: of a request, or of a product
  const void *weight;
  const float *scale, *bias, *q_norm, *k_norm;
  void *keys, *values;  // [N, P, KH, D], in bfloat16 if results are
  double factor;  // eps, or what scores are multiplied by
};

static V load(const float *at) { return _mm512_loadu_ps(at); }
static V load(const uint16_t *at) { return (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(*(const __m256i_u *)at), 16); }
static V load(const int8_t *at) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(*(const __m128i_u *)at)); }

static uint32_t nearest(float x) {  // a bfloat16 in the upper half, ties to even
  uint32_t bits = std::bit_cast<uint32_t>(x);
  return (x != x ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
}

static void store(float *to, float x) { *to = x; }
static void store(uint16_t *to, float x) { *to = nearest(x) >> 16; }

// SIDE rows of a weight times C inputs, with all sums in registers.
template <int C, class W>
static void tile(const W *rows, const float *x, Int width, Int n, float *sums) {
  V acc[SIDE][C] = {};
  for (Int k = 0; k < n; k += WIDTH)
    for (int r = 0; r < SIDE; r++) {
      V w = load(rows + r * n + k);
      __builtin_prefetch((const char *)(rows + r * n + k) + AHEAD);
      for (int c = 0; c < C; c++) acc[r][c] += w * load(x + c * width + k);
    }
  for (int r = 0; r < SIDE; r++)
    for (int c = 0; c < C; c++) sums[c * SIDE + r] = _mm512_reduce_add_ps(acc[r][c]);
}

struct Step {
  const Operator *operators;
  Int count, T;
  float *workspace;  // [T, width]
  Int width;
  const Int *positions;
  const int32_t *tables;  // [T, columns]
  Int columns, half;  // half: results are rounded to bfloat16
  std::atomic<uint32_t> ticket{0}, done{0};  // stage << 16 | next task; tasks that are done

  float rounded(float x) const { return half ? std::bit_cast<float>(nearest(x)) : x; }

  template <class W>
  void product(const Operator &o, Int n, Int end) {
    auto multiply = T == 1 ? tile<1, W> : tile<SIDE, W>;
    for (; n < end; n += SIDE)
      for (Int t = 0; t < T; t += SIDE) {
        float sums[SIDE * SIDE], *row = workspace + t * width;
        multiply((const W *)o.weight + n * o.inputs, row + o.x, width, o.inputs, sums);
        for (Int i = 0, at = n; i < SIDE * std::min<Int>(SIDE, T - t); at = n + ++i % SIDE) {
          float sum = sums[i] * (o.scale ? o.scale[at] : 1) + (o.bias ? o.bias[at] : 0);
          row[i / SIDE * width + o.y + at] = rounded(sum);
        }
      }
  }

  void norm(const float *x, const float *weight, Int n, double eps, float *y) const {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (Int i = 0; i < n; i++) sum += x[i] * x[i];
    float factor = 1 / std::sqrt(sum / n + float(eps));
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
    Int n = o.inputs, end = positions[t] + 1, kv = head * o.kv_heads / o.heads;
    Int begin = o.window ? std::max<Int>(0, end - o.window) : 0;
    float *q = workspace + t * width + o.x + head * n, *out = workspace + t * width + o.y + head * n;
    float most = -INFINITY, total = 0;
    std::vector<float> weights(end);
    for (Int i = begin; i < end; i++) {
      V sum = {};
      for (Int j = 0; j < n; j += WIDTH) sum += load((A *)o.keys + place(o, t, i, kv) + j) * load(q + j);
      most = std::max(most, weights[i] = _mm512_reduce_add_ps(sum) * float(o.factor));
    }
#pragma omp simd reduction(+ : total)
    for (Int i = begin; i < end; i++) total += weights[i] = std::exp(weights[i] - most);
    std::fill(out, out + n, 0);
    for (Int i = begin; i < end; i++)
      for (Int j = 0; j < n; j += WIDTH) {
        V value = load((A *)o.values + place(o, t, i, kv) + j);
        _mm512_storeu_ps(out + j, load(out + j) + weights[i] / total * value);
      }
    for (Int i = 0; i < n; i++) out[i] = rounded(out[i]);
  }

  void task(const Operator &o, Int i) {
    Int t = i / o.tasks, head = i % o.tasks, first = i * ROWS, end = std::min(first + ROWS, o.outputs);
    float *x = workspace + t * width + o.x, *y = workspace + t * width + o.y;
    if (o.code == FLOAT32) product<float>(o, first, end);
    if (o.code == BFLOAT16) product<uint16_t>(o, first, end);
    if (o.code == INT8) product<int8_t>(o, first, end);
    if (o.code == NORM) norm(x, (const float *)o.weight, o.inputs, o.factor, y);
    if (o.code == TURN) half ? turn<uint16_t>(o, t, head) : turn<float>(o, t, head);
    if (o.code == ATTEND) half ? attend<uint16_t>(o, t, head) : attend<float>(o, t, head);
    for (Int j = 0; o.code == ADD && j < o.inputs; j++) y[j] = rounded(y[j] + x[j]);
    for (Int j = 0; (o.code == SILU || o.code == GELU) && j < o.inputs; j++) {
      float z = x[j], slope = o.code == SILU ? z : 1.5957691216f * (z + 0.044715f * z * z * z);
      y[j] = rounded(rounded(z / (1 + std::exp(-slope))) * x[o.inputs + j]);  // 1 + tanh(s / 2) = 2 / (1 + e^-s)
    }
  }

  void work() {  // each thread, until there is no stage left
    for (;;) {
      uint32_t mine = ticket.fetch_add(1), stage = mine >> 16, seen;
      if (stage == count) return;
      Int all = operators[stage].tasks * (operators[stage].code <= INT8 ? 1 : T);
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

extern "C" void run(const Operator *operators, Int count, Int T, float *workspace, Int width, const Int *positions,
                    const int32_t *tables, Int columns, Int half, Int threads) {
  Step step{operators, count, T, workspace, width, positions, tables, columns, half};
#pragma omp parallel num_threads(int(threads))
  step.work();
}
